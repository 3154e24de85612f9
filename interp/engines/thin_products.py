"""Matrix products with few rows, as a compiled decode step has them on a CPU.

x W with one row of x is bound by reading W. As a product and a sum over W as it lies in memory, one loop per row of x
that the compiler fuses, it runs at the memory's speed; the libraries' general product does not (measured: a step of a
model of 135 M parameters takes a third of the time with one row, half with eight).

x is first put into memory: left to itself the compiler computes it anew, norm and activation function included, for
every entry of the result.
"""

import torch
from torch import fx
from torch._inductor.inductor_prims import force_stride_order

aten = torch.ops.aten

MOST_ROWS = 8
"""Beyond, the general product is as fast, and unrolled loops take long to compile."""


def unroll_thin_products(graph: fx.Graph) -> int:
    """Rewrite every product of at most `MOST_ROWS` rows with a weight; how many there were."""
    found = 0
    stored: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target not in (aten.mm.default, aten.addmm.default):
            continue
        *bias, x, weight = node.args
        n_rows = x.meta["val"].shape[0]
        on_cpu = x.meta["val"].device.type == "cpu"
        if n_rows > MOST_ROWS or not on_cpu or node.kwargs or not _is_weight(weight):
            continue
        with graph.inserting_before(node):
            if x not in stored:
                stored[x] = graph.call_function(force_stride_order, (x, [x.meta["val"].shape[1], 1]))
            each = [graph.call_function(aten.select.int, (stored[x], 0, i)) for i in range(n_rows)]
            rows = [_row(graph, one, weight) for one in each]
            new = graph.call_function(aten.stack.default, (rows, 0))
            if bias:
                new = graph.call_function(aten.add.Tensor, (new, bias[0]))
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        found += 1
    graph.eliminate_dead_code()
    return found


def _row(graph: fx.Graph, x: fx.Node, weight: fx.Node) -> fx.Node:
    """x W for one row, with W [in, out] or the transpose of a stored [out, in]."""
    if weight.target is aten.t.default:
        stored, along = weight.args[0], -1
    else:
        stored, along, x = weight, 0, graph.call_function(aten.unsqueeze.default, (x, 1))
    product = graph.call_function(aten.mul.Tensor, (stored, x))
    return graph.call_function(aten.sum.dim_IntList, (product, [along]))


def _is_weight(node: fx.Node) -> bool:
    return node.op == "get_attr" or (node.target is aten.t.default and node.args[0].op == "get_attr")  # type: ignore[union-attr]
