// What the panel says about the chosen node, or about the whole graph. All text enters as text nodes.

function icon(kind) {
  const svg = makeSvg("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14" });
  const drawn = shape(kind, 0, 0, 4.5, 13);
  if (kind === "logit") for (const [name, value] of [["y", -4.5], ["height", 9], ["rx", 3]]) drawn.setAttribute(name, value);
  drawn.setAttribute("class", `node ${kind}`);
  svg.append(drawn);
  return svg;
}

function linkList(title, links, other) {
  const total = links.reduce((sum, link) => sum + Math.abs(link.weight), 0);
  const list = make("ul", { class: "links" });
  const entry = (link) => {
    const node = other(link), share = Math.abs(link.weight) / Math.abs(links[0].weight);
    const bar = make("i", { class: link.weight < 0 ? "negative" : "positive", style: `width:${(100 * share).toFixed(1)}%` });
    return make("li", {}, make("button", {
      type: "button", title: `${longWords(node)}\n${percent(Math.abs(link.weight) / total)} of these ${title.toLowerCase()}`,
      onclick: () => select(node), onmouseenter: () => hover(node, true), onmouseleave: () => hover(node, false),
      onfocus: () => hover(node, true), onblur: () => hover(node, false),
    }, icon(node.kind), make("span", { class: "name" }, listWords(node)), make("span", { class: "bar" }, bar),
       make("span", { class: "weight" }, signed(link.weight))));
  };
  list.append(...links.slice(0, LISTED).map(entry));
  const more = links.length > LISTED ? make("button", {
    type: "button", class: "more", onclick: () => { list.append(...links.slice(LISTED).map(entry)); more.remove(); },
  }, `Show all ${links.length.toLocaleString("en")}`) : null;
  return [make("h3", {}, `${title} `, make("small", {}, links.length ? `${links.length.toLocaleString("en")}, strongest first` : "none in this graph")), list, more];
}
function listWords(node) { return node.kind === "token" || node.kind === "logit" ? node.words : `${node.words} ${place(node)}`; }

function chip(token) { return make("span", { class: "token-chip" }, visible(token)); }

function valueList(title, values) {
  return make("div", {}, make("h3", {}, title), make("ul", { class: "values" },
    ...values.map(([token, value]) => make("li", {}, chip(token), make("span", { class: "number" }, signed(value))))));
}

function contextBlock([tokens, activations]) {
  const largest = Math.max(...activations, 0);
  return make("p", { class: "context" }, ...tokens.map((token, index) => {
    const share = largest > 0 ? Math.max(activations[index], 0) / largest : 0;
    const span = make("span", { class: share === 1 ? "peak" : "" }, visible(token));
    if (share > 0) {
      span.style.background = `rgb(var(--heat) / ${(0.12 + 0.6 * share).toFixed(2)})`;
      span.title = plain(activations[index]);
    }
    return span;
  }));
}

function featureParts(node) {
  const data = card(node);
  if (!data) return [make("p", { class: "note", style: "margin-top:18px" }, "No examples of this feature were recorded.")];
  const parts = [make("div", { class: "columns" }, valueList("Promotes", data.top_logits), valueList("Suppresses", data.bottom_logits))];
  if (data.contexts.length) parts.push(make("h3", {}, "Most active on"), ...data.contexts.map(contextBlock));
  return parts;
}

function facts(node) {
  const rows = [];
  const add = (name, value) => rows.push(make("dt", {}, name), make("dd", {}, value));
  if (node.kind !== "token" && node.kind !== "logit") add("Position", make("span", {}, chip(metadata.prompt_tokens[node.pos]), ` @${node.pos}`));
  if (node.kind === "feature" && node.data.activation !== null) add("Activation", plain(node.data.activation));
  if (node.kind === "logit") add("Probability", percent(node.data.token_prob));
  if (node.data.pre_activation !== undefined) {
    const kept = node.inputs.reduce((sum, link) => sum + link.weight, 0);
    add(node.kind === "logit" ? "Explained value" : "Pre-activation", `${plain(node.data.pre_activation)} (the inputs below sum to ${plain(kept)})`);
  }
  if (node.data.influence !== null && node.data.influence !== undefined) add("Influence", `among the top ${percent(node.data.influence)}`);
  const fraction = card(node)?.fraction_active;
  if (fraction !== null && fraction !== undefined) add("Active on", `${fraction >= 0.0005 ? (100 * fraction).toFixed(2) : (100 * fraction).toPrecision(1)} % of tokens`);
  if (node.kind === "feature") add("Latent", `#${latent(node)} of layer ${node.data.layer}`);
  if (node.kind === "error") add("Meaning", "what this layer's dictionary did not reconstruct here");
  if (node.kind === "bias") add("Meaning", "the constant terms of this layer");
  if (own.excluded_positions.includes(node.pos) && node.kind !== "logit") add("Excluded", "the dictionaries were not trained on this token");
  return make("dl", {}, ...rows);
}

function overview() {
  const { certificate, scores } = own;
  const parts = [make("h2", {}, "Overview"), make("p", { class: "note" }, "Choose a node to see what drives it and what it drives.")];
  if (scores) {
    const excluded = own.excluded_positions.length > 0;
    const line = (name, all, without, title) => make("tr", { title }, make("th", { scope: "row" }, name),
      make("td", {}, percent(all)), excluded ? make("td", {}, percent(without)) : null);
    const names = own.excluded_positions.map((pos) => visible(metadata.prompt_tokens[pos]).trim()).join(", ");
    parts.push(make("h3", {}, "Scores of the unpruned graph"), make("table", {},
      make("thead", {}, make("tr", {}, make("th", {}), make("th", { scope: "col" }, "all positions"),
        excluded ? make("th", { scope: "col" }, `without ${names}`) : null)),
      make("tbody", {},
        line("Replacement", scores.replacement, scores.replacement_without_excluded_positions, "Share of influence that comes from tokens, of tokens and errors"),
        line("Completeness", scores.completeness, scores.completeness_without_excluded_positions, "Share of inputs that are not errors, weighted by influence"))));
  }
  if (certificate) {
    parts.push(make("h3", {}, "Certificate"), make("p", {},
      `Over ${certificate.rows.toLocaleString("en")} rows, a node's inputs sum to its pre-activation within `,
      make("strong", {}, certificate.max_relative_error.toExponential(1)), ` relative (${certificate.max_absolute_error.toExponential(1)} absolute). `,
      make("span", { class: "note" }, `Computed on the ${certificate.scope}.`)));
  }
  const passesFeature = ({ node_ids }) => node_ids.some((id) => byId.get(id)?.kind === "feature");
  for (const [title, paths] of [
    ["Strongest paths to the top logit", view.paths.filter((path) => !passesFeature(path))],
    ["Strongest paths that pass a feature", view.paths.filter(passesFeature)],
  ]) {
    if (paths.length) parts.push(make("h3", {}, title), make("ol", { class: "paths" }, ...paths.map(pathEntry)));
  }
  return parts;
}

function pathEntry({ node_ids, share, sign }) {
  const item = make("li", {}, make("span", { class: `share ${sign < 0 ? "negative" : "positive"}-text` }, `${sign < 0 ? "−" : "+"} ${percent(share)}`));
  node_ids.forEach((id, index) => {
    const node = byId.get(id);
    if (index) item.append(make("span", { class: "arrow" }, "→"));
    item.append(node
      ? make("button", { type: "button", class: "step", title: longWords(node), onclick: () => select(node),
                         onmouseenter: () => hover(node, true), onmouseleave: () => hover(node, false) }, stepWords(node))
      : make("span", { class: "note" }, `${id} (pruned)`));
  });
  return item;
}
function stepWords(node) { return node.kind === "logit" || node.kind === "token" ? node.words : `${node.words} @${node.pos}`; }

function showPanel() {
  const panel = element("panel");
  panel.scrollTop = 0;
  if (!selected) { panel.replaceChildren(...overview()); return; }
  const parts = [
    make("button", { type: "button", class: "back", onclick: () => select(null) }, "← Overview"),
    make("h2", {}, selected.words), facts(selected),
    ...(selected.kind === "feature" ? featureParts(selected) : []),
    ...(selected.kind === "feature" || selected.kind === "logit" ? linkList("Inputs", selected.inputs, ({ source }) => source) : []),
    ...(selected.kind === "logit" ? [] : linkList("Outputs", selected.outputs, ({ target }) => target)),
  ];
  panel.replaceChildren(...parts.filter(Boolean));
}
