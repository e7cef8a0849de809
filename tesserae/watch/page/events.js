// Events.
{
  const part = section("events", "Events");
  const items = el("ol"), box = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events, the latest first" }, items);
  part.body.append(box);
  const alarming = new Set(["slow", "slow_link", "lost", "silent", "stacks", "hang", "bad step", "corruption"]), fine = new Set(["slow_over", "slow_link_over", "recovered"]);
  let drawn = -1;
  drawers.push(() => {
    const events = known.events;
    if (!part.show(events.length ? "" : "Nothing has happened yet: no rank was slow or lost, the dial was not turned. Checkpoints and traces are told here, too.")) return;
    if (drawn === events.length) return;
    drawn = events.length;
    set(part.readout, `${plural(events.length, "event")}, the latest first`);
    items.replaceChildren(...events.slice(-200).reverse().map((event) => {
      const when = new Date(1e3 * event.time);
      const kind = String(event.kind || "").replace("_over", " no more").replace("_", " ");
      return el("li", { class: alarming.has(event.kind) ? "alarm" : fine.has(event.kind) ? "fine" : "" },
        el("time", { datetime: isNumber(event.time) ? when.toISOString() : null, title: isNumber(event.time) ? when.toLocaleString() : null }, isNumber(event.time) ? when.toTimeString().slice(0, 8) : ""),
        el("span", { class: "step" }, isNumber(event.step) ? `step ${whole(event.step)}` : ""),
        el("span", { class: "kind" }, kind),
        el("span", { class: "text" }, String(event.text || "")));
    }));
  });
}
