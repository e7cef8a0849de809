// Sections.
const drawers = [];
// What a run tells may be of another version: a section that cannot read it stays as it was, and the others go on.
const drawAll = () => drawers.forEach((draw) => {
  try { draw(); } catch (error) { console.debug(error); }
});
const section = (id, title) => {
  const heading = el("h2", {}, title), readout = el("span", { class: "readout" }), tools = el("div", { class: "tools" });
  const none = el("p", { class: "none", hidden: true }), body = el("div");
  $(id).append(el("div", { class: "head" }, heading, readout, tools), none, body);
  $(id).setAttribute("aria-label", title);
  const show = (why) => {  // why: the reason that there is nothing to see; empty: there is
    none.hidden = !why;
    body.hidden = Boolean(why);
    tools.hidden = Boolean(why);
    if (why) { none.innerHTML = why; set(readout, ""); }  // only texts of this file
    return !why;
  };
  return { heading, readout, tools, none, body, show };
};
const canvasIn = (parent, label, height) => {
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": label });
  canvas.style.height = `${height}px`;
  parent.append(canvas);
  return canvas;
};
const fit = (canvas, height) => {
  if (height !== undefined && canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, tall = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(tall * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(tall * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, tall);
  pen.font = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  pen.textBaseline = "middle";
  return { pen, width, height: tall };
};
const watchSize = (canvas, draw) => {
  let last = 0;
  new ResizeObserver(() => {
    if (canvas.clientWidth && canvas.clientWidth !== last) { last = canvas.clientWidth; draw(); }
  }).observe(canvas);
};
const tip = (text, x, y) => {
  const node = $("tip");
  node.hidden = !text;
  if (!text) return;
  set(node, text);
  const box = node.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth - 6 ? x - 14 - box.width : x + 14;
  node.style.left = `${clamp(left, 6, Math.max(6, innerWidth - box.width - 6))}px`;
  node.style.top = `${y + 16 + box.height > innerHeight ? Math.max(6, y - box.height - 10) : y + 16}px`;
};
// Numbers under the pointer, a finger, or the arrow keys. `at(x, y)` returns the text; `redraw(x, y)` may mark it.
const hover = (canvas, at, step) => {
  let pointer = null;
  const tell = (x, y) => {
    const box = canvas.getBoundingClientRect();
    tip(at(x, y) || "", box.left + x, box.top + y);
  };
  const over = (event) => { pointer = [event.offsetX, event.offsetY]; tell(...pointer); };
  canvas.addEventListener("pointermove", over);
  canvas.addEventListener("pointerdown", over);
  canvas.addEventListener("pointerleave", () => { pointer = null; at(-1, -1); tip(""); });
  canvas.addEventListener("blur", () => { pointer = null; at(-1, -1); tip(""); });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const [dx, dy] = step ? step() : [8, 8];
    pointer = pointer || [canvas.clientWidth / 2, canvas.clientHeight / 2];
    pointer = [clamp(pointer[0] + move[0] * dx, 1, canvas.clientWidth - 1), clamp(pointer[1] + move[1] * dy, 1, canvas.clientHeight - 1)];
    tell(...pointer);
  });
};
const isFlat = (low, high) => high - low < 1e-9 * Math.abs(high);  // what is left is rounding
const niceTicks = (low, high, wanted) => {
  if (isFlat(low, high)) high = low;
  const span = high - low || 1, rough = span / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  // Counted: of numbers of which the next one is further than a step a sum of steps never comes to an end.
  const begin = Math.ceil(low / step), many = Math.min(wanted + 1, Math.floor((high + 1e-9 * span) / step) - begin + 1);
  const ticks = [];
  for (let i = 0; i < many; i++) ticks.push((begin + i) * step || 0);
  return ticks;
};
const legend = (parent, entries) => {
  const node = el("div", { class: "legend" });
  node.append(...entries.map(([name, color]) => el("span", {}, el("i", { color }), name)));
  parent.append(node);
  return node;
};
const refill = (node, entries) => {
  const mark = entries.map((entry) => entry.join()).join("|");
  if (node.dataset.mark === mark) return;
  node.dataset.mark = mark;
  node.replaceChildren(...entries.map(([name, color, kind]) => el("span", { class: kind }, el("i", kind === "dashes" ? {} : { color }), name)));
};
