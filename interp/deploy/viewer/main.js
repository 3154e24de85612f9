// What the reader does: choose a node (mirrored in the address as #node=<id>), walk, filter, search.

function select(node) {
  selected = node;
  const hash = node ? `#node=${encodeURIComponent(node.id)}` : "";
  if (location.hash !== hash) history.pushState(null, "", hash || location.pathname + location.search);
  applyThreshold();
  highlight();
  showPanel();
  element("announce").textContent = node ? `${longWords(node)}: ${node.inputs.length} inputs, ${node.outputs.length} outputs` : "Nothing selected";
  if (node) reveal(node);
}

function reveal(node) {
  const scroll = element("scroll"), margin = 60;
  const x = node.x + 52 - scroll.scrollLeft, y = node.y - scroll.scrollTop;
  if (x < 52 + margin || x > scroll.clientWidth - margin) scroll.scrollLeft = node.x - scroll.clientWidth / 2;
  if (y < margin || y > scroll.clientHeight - 38 - margin) scroll.scrollTop = node.y - scroll.clientHeight / 2;
}

function selectFromHash() {
  const match = /^#node=(.+)$/.exec(location.hash);
  const node = match ? byId.get(decodeURIComponent(match[1])) ?? null : null;
  if (node !== selected) select(node);
}

// Keyboard and pointer

function walk(key) {
  const shown = nodes.filter((node) => !node.hidden);
  if (!selected) return logits[0];
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const line = shown.filter(({ row }) => row === selected.row).sort((a, b) => a.x - b.x || a.y - b.y);
    return line[line.indexOf(selected) + (key === "ArrowRight" ? 1 : -1)];
  }
  const upwards = key === "ArrowUp";
  const beyond = shown.filter(({ row }) => (upwards ? row > selected.row : row < selected.row));
  const next = upwards ? Math.min(...beyond.map(({ row }) => row)) : Math.max(...beyond.map(({ row }) => row));
  return beyond.filter(({ row }) => row === next).reduce((best, node) =>
    (!best || Math.abs(node.x - selected.x) < Math.abs(best.x - selected.x) ? node : best), undefined);
}

element("scroll").addEventListener("keydown", (event) => {
  if (event.key.startsWith("Arrow")) {
    event.preventDefault();
    const next = walk(event.key);
    if (next) select(next);
  } else if (event.key === "Enter" && selected) {
    (element("panel").querySelector(".links button") ?? element("panel").querySelector("button"))?.focus();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { select(null); element("scroll").focus(); }
  if (event.key === "/" && document.activeElement !== element("search")) { event.preventDefault(); element("search").focus(); }
});
element("nodes").addEventListener("click", (event) => {
  const node = byId.get(event.target.dataset.id);
  if (node) select(node);
  event.stopPropagation();
});
element("plot").addEventListener("click", () => select(null));

const tooltip = element("tooltip");
element("nodes").addEventListener("pointerover", (event) => {
  const node = byId.get(event.target.dataset.id);
  if (!node) return;
  const promoted = card(node)?.top_logits.slice(0, 4).map(([token]) => quote(token)).join(" ");
  tooltip.textContent = longWords(node) + (promoted ? `\npromotes ${promoted}` : "");
  tooltip.hidden = false;
  tooltip.style.left = `${Math.min(event.clientX + 14, innerWidth - tooltip.offsetWidth - 10)}px`;
  tooltip.style.top = `${Math.min(event.clientY + 14, innerHeight - tooltip.offsetHeight - 10)}px`;
  hover(node, true);
});
element("nodes").addEventListener("pointerout", (event) => {
  tooltip.hidden = true;
  const node = byId.get(event.target.dataset.id);
  if (node) hover(node, false);
});

let frame = 0;
element("threshold").addEventListener("input", () => {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => { applyThreshold(); highlight(); });
});
function matches() {
  const wanted = element("search").value.trim().toLowerCase();
  return wanted ? nodes.filter((node) => !node.hidden && node.searchable.includes(wanted)) : [];
}
function markMatches() {
  const found = new Set(matches());
  for (const node of nodes) node.shape.classList.toggle("match", found.has(node));
  element("matches").textContent = element("search").value.trim() ? found.size.toLocaleString("en") : "";
}
element("search").addEventListener("input", markMatches);
element("search").addEventListener("keydown", (event) => {
  const found = matches();
  if (event.key === "Enter" && found.length) select(found[(found.indexOf(selected) + 1) % found.length]);
});

// Start

const legend = element("legend");
for (const { name, plural } of Object.values(KINDS)) {
  const count = nodes.filter(({ kind }) => kind === name).length;
  if (!count) continue;
  const button = make("button", { type: "button", "aria-pressed": "true", title: `${count.toLocaleString("en")} ${plural}; press to hide or show`,
    onclick: () => {
      const hide = !hiddenKinds.delete(name);
      if (hide) hiddenKinds.add(name);
      button.setAttribute("aria-pressed", String(!hide));
      applyThreshold();
      highlight();
    } }, icon(name), plural);
  legend.append(button);
}
element("prompt").append(visible(metadata.prompt).trim(), make("span", { class: "arrow" }, "  →  "), chip(logitToken(logits[0])),
  make("span", { class: "arrow" }, ` ${percent(logits[0].data.token_prob)}`));
const summary = [own.model, `${nodes.length.toLocaleString("en")} nodes, ${graph.links.length.toLocaleString("en")} edges`];
if (own.scores) {
  const { replacement, completeness } = own.scores;
  summary.push(`replacement ${percent(replacement)}, completeness ${percent(completeness)}`);
  if (own.excluded_positions.length) {
    const without = own.scores;
    summary.push(`without excluded positions ${percent(without.replacement_without_excluded_positions)}, ${percent(without.completeness_without_excluded_positions)}`);
  }
}
if (own.certificate) summary.push(`certificate ${own.certificate.max_relative_error.toExponential(1)}`);
element("summary").append(...summary.map((text) => make("span", {}, text)));

draw();
showPanel();
selectFromHash();
addEventListener("hashchange", selectFromHash);
addEventListener("popstate", selectFromHash);
let drawnSize = "";
new ResizeObserver(() => {
  const size = `${element("scroll").clientWidth} ${element("scroll").clientHeight}`;
  if (size !== drawnSize) { drawnSize = size; draw(); }
}).observe(element("scroll"));
