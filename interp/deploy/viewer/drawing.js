// Where everything lies and how it looks: tokens across, layers upwards; a cell is a small grid, most important first.

const layout = { columns: [], rows: [], width: 0, height: 0 };
const cells = new Map();
for (const node of nodes) {
  if (node.kind === "logit") continue;
  const key = `${node.row}|${node.pos}`;
  if (!cells.has(key)) cells.set(key, []);
  cells.get(key).push(node);
}
for (const cell of cells.values()) {
  cell.sort((a, b) => KINDS[a.data.feature_type].order - KINDS[b.data.feature_type].order || a.influence - b.influence);
}
const logits = nodes.filter((node) => node.kind === "logit").sort((a, b) => b.data.token_prob - a.data.token_prob);

function arrange() {
  const across = metadata.prompt_tokens.map(() => 1), down = Array(rowCount).fill(1);
  for (const [key, cell] of cells) {
    const pos = Number(key.split("|")[1]);
    across[pos] = Math.max(across[pos], Math.ceil(Math.sqrt(cell.length * 2.4)));
  }
  for (const [key, cell] of cells) {
    const [row, pos] = key.split("|").map(Number);
    down[row] = Math.max(down[row], Math.ceil(cell.length / across[pos]));
  }
  const natural = metadata.prompt_tokens.map((token, pos) =>
    Math.max(MIN_COLUMN, across[pos] * PITCH + COLUMN_PAD, Math.min(visible(token).length * 8 + 12, 150)));
  const scroll = element("scroll");
  const spare = Math.max(0, scroll.clientWidth - 53 - natural.reduce((sum, width) => sum + width, 0));
  let x = 0;
  layout.columns = natural.map((width) => {
    const column = { x, width: width + spare / natural.length };
    x += column.width;
    return column;
  });
  layout.width = x;

  const lines = logitLines(x);
  const heights = down.map((count, row) =>
    row === rowCount - 1 ? lines.length * 28 + 20 : Math.max(MIN_ROW, count * PITCH + ROW_PAD));
  const spareHeight = Math.max(0, scroll.clientHeight - 39 - heights.reduce((sum, height) => sum + height, 0));
  let y = 0;
  layout.rows = heights.map((_, index) => heights.length - 1 - index).map((row) => {
    const height = heights[row] + (row === rowCount - 1 ? 0 : spareHeight / (rowCount - 1));
    const placed = { row, y, height };
    y += height;
    return placed;
  }).reverse();
  layout.height = y;

  for (const [key, cell] of cells) {
    const [row, pos] = key.split("|").map(Number);
    const used = Math.min(cell.length, across[pos]), rowsUsed = Math.ceil(cell.length / across[pos]);
    const column = layout.columns[pos], band = layout.rows[row];
    cell.forEach((node, index) => {
      node.x = column.x + column.width / 2 + ((index % across[pos]) - (used - 1) / 2) * PITCH;
      node.y = band.y + band.height / 2 + (Math.floor(index / across[pos]) - (rowsUsed - 1) / 2) * PITCH;
    });
  }
  lines.forEach((line, index) => {
    let right = x - 14;
    for (const node of line) {
      node.x = right - node.width / 2;
      node.y = layout.rows[rowCount - 1].y + 24 + index * 28;
      right -= node.width + 8;
    }
  });
}

function logitText(node) { return `${visible(logitToken(node))}  ${percent(node.data.token_prob)}`; }
function logitLines(width) {
  const lines = [[]];
  let used = 0;
  for (const node of logits) {
    node.width = Math.min(logitText(node).length * 7.3 + 20, width - 28);
    if (used + node.width + 8 > width - 28 && lines.at(-1).length) { lines.push([]); used = 0; }
    lines.at(-1).push(node);
    used += node.width + 8;
  }
  return lines;
}

// Shapes, bands and edges

function shape(kind, x, y, size, width) {
  switch (kind) {
    case "feature": case "bias":
      return makeSvg("circle", { cx: x, cy: y, r: kind === "bias" ? 2.1 : size });
    case "error": return makeSvg("path", { d: `M${x} ${y - 5}L${x + 5} ${y}L${x} ${y + 5}L${x - 5} ${y}Z` });
    case "logit": return makeSvg("rect", { x: x - width / 2, y: y - 11, width, height: 22, rx: 6 });
    case "position": return makeSvg("path", { d: `M${x} ${y - 5}L${x + 5} ${y + 4}L${x - 5} ${y + 4}Z` });
    default: return makeSvg("rect", { x: x - 5, y: y - 5, width: 10, height: 10, rx: 1 });
  }
}

function draw() {
  arrange();
  const plot = element("plot");
  plot.setAttribute("width", layout.width);
  plot.setAttribute("height", layout.height);
  element("bands").replaceChildren(
    ...layout.rows.filter(({ row }) => row % 2 === 1 && row < rowCount - 1)
      .map(({ y, height }) => makeSvg("rect", { class: "band", x: 0, y, width: layout.width, height })),
    ...layout.columns.slice(1).map(({ x }) =>
      makeSvg("line", { class: "divider", x1: x, x2: x, y1: layout.rows[rowCount - 2].y, y2: layout.height })));
  element("layers").replaceChildren(...layout.rows.map(({ row, y, height }) => {
    const text = row === 0 ? "embed" : row === rowCount - 1 ? "logits" : `L${row - 1}`;
    return make("span", { style: `top:${y + height / 2}px` }, text);
  }));
  element("tokens").replaceChildren(...metadata.prompt_tokens.map((token, pos) => {
    const { x, width } = layout.columns[pos];
    const excluded = own.excluded_positions.includes(pos);
    const title = excluded ? "Excluded: the dictionaries were not trained on this token" : `position ${pos}`;
    return make("span", { style: `left:${x + width / 2}px;max-width:${width - 6}px`, title,
                          class: excluded ? "excluded" : "" }, visible(token).trim() || visible(token) || "∅");
  }));
  const drawn = document.createDocumentFragment();
  for (const node of nodes) {
    node.shape = shape(node.kind, node.x, node.y, 3 + 2.6 * (1 - node.influence), node.width);
    node.shape.setAttribute("class", `node ${node.kind}${node === logits[0] ? " top" : ""}`);
    node.shape.dataset.id = node.id;
    drawn.append(node.shape);
    if (node.kind === "logit") {
      node.text = makeSvg("text", { class: "logit-text", x: node.x, y: node.y + 4, "text-anchor": "middle" });
      node.text.textContent = logitText(node);
      drawn.append(node.text);
    }
  }
  element("nodes").replaceChildren(drawn);
  applyThreshold();
  highlight();
  markMatches();
}

function edgePath(link, strongest) {
  const { source, target, weight } = link;
  const middle = (source.y + target.y) / 2, share = Math.abs(weight) / strongest;
  const path = makeSvg("path", {
    class: `edge ${weight < 0 ? "negative" : "positive"}`,
    d: `M${source.x} ${source.y}C${source.x} ${middle} ${target.x} ${middle} ${target.x} ${target.y}`,
    "stroke-width": (0.6 + 4 * Math.sqrt(share)).toFixed(2), "stroke-opacity": (0.2 + 0.65 * Math.sqrt(share)).toFixed(2),
  });
  path.dataset.ends = `${source.id} ${target.id}`;
  return path;
}

// Edges of the selected node, or those of the strongest paths.
function shownLinks() {
  if (selected) return [selected.inputs, selected.outputs];
  const onPaths = new Map();
  for (const { node_ids } of view.paths) {
    for (let step = 1; step < node_ids.length; step += 1) {
      const link = byId.get(node_ids[step])?.inputs.find(({ source }) => source.id === node_ids[step - 1]);
      if (link) onPaths.set(`${link.source.id} ${link.target.id}`, link);
    }
  }
  return [[...onPaths.values()].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight))];
}

function highlight() {
  const paths = [];
  for (const node of nodes) {
    node.shape.classList.remove("linked", "selected");
    node.text?.classList.remove("linked");
  }
  for (const links of shownLinks()) {
    const strongest = Math.abs(links[0]?.weight ?? 1);
    for (const link of links) {
      if (link.source.hidden || link.target.hidden) continue;
      for (const end of [link.source, link.target]) {
        end.shape.classList.add("linked");
        end.text?.classList.add("linked");
      }
      if (Math.abs(link.weight) >= SMALLEST_EDGE * strongest) paths.push(edgePath(link, strongest));
    }
  }
  element("edges").replaceChildren(...paths.reverse());
  element("plot").classList.toggle("focus", selected !== null);
  if (selected) {
    if (selected.kind !== "logit") element("edges").append(makeSvg("circle", { class: "halo", cx: selected.x, cy: selected.y, r: 10 }));
    selected.shape.classList.add("selected", "linked");
    selected.text?.classList.add("linked");
    element("nodes").append(selected.shape, ...(selected.text ? [selected.text] : []));
  }
}

function applyThreshold() {
  const threshold = Number(element("threshold").value) / 100;
  let shown = 0;
  for (const node of nodes) {
    const always = node.kind === "token" || node.kind === "logit" || node === selected || threshold === 1;
    node.hidden = hiddenKinds.has(node.kind) || !(always || node.influence <= threshold);
    node.shape.classList.toggle("hidden", node.hidden);
    if (node.text) node.text.style.display = node.hidden ? "none" : "";
    shown += !node.hidden;
  }
  const count = (number) => number.toLocaleString("en");
  element("threshold-text").textContent = shown === nodes.length ? `all ${count(shown)} nodes`
    : `${threshold === 1 ? "" : `top ${Math.round(100 * threshold)} %: `}${count(shown)} of ${count(nodes.length)} nodes`;
}

function hover(node, on) {
  node.shape.classList.toggle("hover", on);
  for (const path of element("edges").querySelectorAll(".edge")) {
    path.classList.toggle("dim", on && selected !== null && node !== selected && !path.dataset.ends.split(" ").includes(node.id));
  }
}
