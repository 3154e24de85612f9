"use strict";
// What is drawn: the nodes and links of #graph-data, the feature cards and paths of #view-data, and words for them.

const graph = JSON.parse(document.getElementById("graph-data").textContent);
const view = JSON.parse(document.getElementById("view-data").textContent);
const { metadata } = graph;
const own = metadata.interp;
const element = (id) => document.getElementById(id);
const svgNamespace = element("plot").namespaceURI;

const KINDS = {
  "cross layer transcoder": { name: "feature", plural: "features", order: 0 },
  "mlp reconstruction error": { name: "error", plural: "errors", order: 1 },
  position: { name: "position", plural: "positions", order: 3 },
  bias: { name: "bias", plural: "biases", order: 2 },
  embedding: { name: "token", plural: "tokens", order: 0 },
  logit: { name: "logit", plural: "logits", order: 0 },
};
const PITCH = 13, ROW_PAD = 10, COLUMN_PAD = 18, MIN_COLUMN = 62, MIN_ROW = 24, LISTED = 15, SMALLEST_EDGE = 0.004;

// Nodes by id, their links both ways, one list of rows from embedding to logits

const nodes = graph.nodes.map((data) => {
  const kind = KINDS[data.feature_type].name;
  const row = data.layer === "E" ? 0 : kind === "logit" ? own.n_layers + 1 : Number(data.layer) + 1;
  return { data, kind, row, id: data.node_id, pos: data.ctx_idx, inputs: [], outputs: [], hidden: false,
           influence: data.influence ?? 0 };
});
const byId = new Map(nodes.map((node) => [node.id, node]));
for (const { source, target, weight } of graph.links) {
  const link = { source: byId.get(source), target: byId.get(target), weight };
  link.target.inputs.push(link);
  link.source.outputs.push(link);
}
for (const node of nodes) {
  node.inputs.sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
  node.outputs.sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
  node.words = describe(node);
  node.searchable = searchable(node);
}
const rowCount = own.n_layers + 2;
const hiddenKinds = new Set();
let selected = null;

function visible(text) { return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", ""); }
function quote(text) { return `“${visible(text)}”`; }
function logitToken(node) {
  const match = /^Output "([^]*)" \(p=/.exec(node.data.clerp);
  return match ? match[1] : String(node.data.feature);
}
function latent(node) { return node.id.split("_")[1]; }
function card(node) { return node.kind === "feature" ? view.features[`${node.data.layer}_${latent(node)}`] : undefined; }

function describe(node) {
  const at = metadata.prompt_tokens[node.pos];
  switch (node.kind) {
    case "feature": return node.data.clerp ? `L${node.data.layer} ${node.data.clerp}` : `L${node.data.layer} #${latent(node)}`;
    case "error": return `error L${node.data.layer}`;
    case "bias": return `bias L${node.data.layer}`;
    case "position": return "position";
    case "token": return `token ${quote(at)}`;
    default: return `logit ${quote(logitToken(node))}`;
  }
}
function place(node) { return `${quote(metadata.prompt_tokens[node.pos])} @${node.pos}`; }
function longWords(node) {
  return node.kind === "token" || node.kind === "logit" ? `${node.words} @${node.pos}` : `${node.words} at ${place(node)}`;
}
function searchable(node) {
  const promoted = (card(node)?.top_logits ?? []).map(([token]) => token);
  return [node.words, node.id, `#${latent(node)}`, metadata.prompt_tokens[node.pos], ...promoted].join("\n").toLowerCase();
}

function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(100 * share).toFixed(share >= 0.0995 || share === 0 ? 0 : 1)} %`;
}
function signed(value) {
  const size = Math.abs(value);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3;
  const text = size !== 0 && size < 0.001 ? size.toExponential(1) : size.toFixed(digits);
  return (value < 0 ? "−" : "+") + text;
}
function plain(value) { return signed(value).replace("+", ""); }

function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
function makeSvg(tag, attributes = {}) {
  const made = document.createElementNS(svgNamespace, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
