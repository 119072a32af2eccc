// The drawing of a program: nodes in layers by the longest way to them, one row for each node of a layer.
"use strict";

const WIDTH = 150, HEIGHT = 26, GAP = 34;

function layersOf(nodes, edges) {
  const layer = new Map(nodes.map((node) => [node.id, 0]));
  for (let round = 0; round < nodes.length; round++) {
    let moved = false;
    for (const edge of edges) {
      if (layer.get(edge.to) < layer.get(edge.from) + 1) { layer.set(edge.to, layer.get(edge.from) + 1); moved = true; }
    }
    if (!moved) break;
  }
  return layer;
}

function svg(kind, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function graphOf(nodes, edges) {
  const layer = layersOf(nodes, edges), rows = new Map(), place = new Map();
  for (const node of nodes) {
    const column = layer.get(node.id), row = rows.get(column) || 0;
    rows.set(column, row + 1);
    place.set(node.id, [column * (WIDTH + GAP) + 4, row * (HEIGHT + 10) + 4]);
  }
  const width = (Math.max(0, ...layer.values()) + 1) * (WIDTH + GAP), height = Math.max(1, ...rows.values()) * (HEIGHT + 10) + 8;
  const drawing = svg("svg", { width, height, role: "img" });
  for (const edge of edges) {
    const [x1, y1] = place.get(edge.from), [x2, y2] = place.get(edge.to), a = x1 + WIDTH, b = y1 + HEIGHT / 2, d = y2 + HEIGHT / 2;
    drawing.append(svg("path", { d: `M${a},${b} C${a + GAP / 2},${b} ${x2 - GAP / 2},${d} ${x2},${d}` }));
  }
  for (const node of nodes) {
    const [x, y] = place.get(node.id), box = svg("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 3 });
    box.append(svg("title", {}, `${node.name}, island ${node.island}`));
    const name = node.name.length > 19 ? node.name.slice(0, 18) + "…" : node.name;
    drawing.append(box, svg("text", { x: x + 6, y: y + 17 }, `${node.island}: ${name}`));
  }
  return drawing;
}
