// What each rank does now.
{
  const part = section("doing", "What each rank does now");
  const most = 9;
  const rows = [];
  const body = el("tbody");
  const columns = el("colgroup");
  for (const width of ["21%", "15%", "43%", "21%"]) { const column = el("col"); column.style.width = width; columns.append(column); }
  part.body.append(el("table", {}, columns, el("thead", {}, el("tr", {}, el("th", {}, "rank"), el("th", {}, "step"), el("th", {}, "stage, unit"), el("th", { class: "num" }, "for"))), body));
  const rest = el("p", { class: "quiet" });
  rest.style.minHeight = "38px";
  rest.style.marginTop = "8px";
  part.body.append(rest);
  const draw = () => {
    const { now, run } = known;
    const ranks = list(now && now.ranks);
    if (!part.show(ranks.length ? "" : "No rank has told what it does. This needs the monitor (<code>monitor/now.json</code>).")) return;
    const over = !run || !run.live;
    const waits = new Set(list(now.waits));
    const slow = new Set(list(now.slow).map((entry) => entry.rank));
    const badness = (rank) => (trouble(rank) ? 4 : 0) + (slow.has(rank.rank) ? 2 : 0) + (waits.has(rank.stage) ? 0 : 0.5);
    // Trouble first; the others keep their order, so that a row does not move while one reads it.
    const sorted = ranks.map((rank) => ({ rank, bad: badness(rank) })).sort((a, b) => Math.floor(b.bad) - Math.floor(a.bad) || a.rank.rank - b.rank.rank);
    set(part.readout, over ? "as it was told last" : "trouble first");
    const shown = sorted.slice(0, most);
    while (rows.length < shown.length) {
      const row = el("tr", {}, el("td", {}, el("span"), el("span", { class: "badge" }, "slow")), el("td"), el("td", {}, el("i"), el("span")), el("td", { class: "num" }));
      rows.push(row);
      body.append(row);
    }
    while (rows.length > shown.length) rows.pop().remove();
    shown.forEach(({ rank }, i) => {
      const wrong = trouble(rank);
      const [name, step, stage, time] = rows[i].children;
      rows[i].className = wrong ? "bad" : "";
      set(name.firstChild, whole(rank.rank));
      name.lastChild.hidden = !slow.has(rank.rank);
      set(step, rank.stage ? whole(rank.step) : "–");
      stage.firstChild.style.background = stageColor(rank.stage, list(now.stages).indexOf(rank.stage));
      set(stage.lastChild, `${rank.stage || "–"}${rank.unit ? `, ${rank.unit}` : ""}`);
      set(time, wrong && rank.age > 5 ? `silent ${duration(rank.age)}` : rank.stage ? seconds(rank.for) : "–");
      rows[i].title = `rank ${rank.rank}${hostSuffix(rank.rank)}: ${rank.stage ? `heard of ${seconds(rank.age)} ago` : "not heard of yet"}`;
    });
    const hidden = sorted.slice(most);
    const groups = new Map();
    for (const { rank } of hidden) groups.set(rank.stage, (groups.get(rank.stage) || 0) + 1);
    const parts = [...groups].sort((a, b) => b[1] - a[1]).map(([stage, many]) => `${whole(many)} ${stage ? `in ${stage}` : "not heard of yet"}`);
    set(rest, hidden.length ? `${plural(hidden.length, "more rank")}: ${parts.join(", ")}.` : "");
  };
  drawers.push(draw);
}
