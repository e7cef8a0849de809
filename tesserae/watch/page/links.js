// What goes over which link in a step, how fast, and whose is the slowest.
{
  const part = section("links", "Links, hop by hop");
  const body = el("tbody");
  const classOf = (column) => ["", "num", "num time", "num", "num"][column];
  const columns = el("colgroup", {}, ["30%", "20%", "16%", "13%", "21%"].map((width, i) => el("col", { width, class: classOf(i) })));
  const heads = [["link, hop", ""], ["sent", "The most that a rank has sent in the last step"], ["time", "Of the verbs in the last step, median of the ranks: with what they wait for others"],
    ["GB/s", "Of the quickest of the last verbs, which waited least: median of the ranks"], ["slowest", "The rank whose quickest verb was the slowest, and its GB/s"]];
  part.body.append(el("table", { class: "hops" }, columns, el("thead", {}, el("tr", {}, heads.map(([name, title], i) => el("th", { scope: "col", class: classOf(i), title }, name)))), body));
  let filled = "";
  const rate = (speed) => (speed > 0 ? digits(speed / 1e9) : "–");

  // A column of the tables that are [rank][hop]; zeros are of ranks that did not take part.
  const hopsOf = () => {
    const links = (known.now && known.now.links) || {};
    return list(links.hops).map((hop, i) => {
      const column = (table) => list(links[table]).map((of) => list(of)[i]).filter((value) => value > 0);
      const slowest = list(links.slowest)[i];
      return { ...hop, sent: Math.max(0, ...column("bytes")), time: median(column("seconds")), speed: median(column("speed")),
        slowest, least: isNumber(slowest) ? list(list(links.speed)[slowest])[i] : NaN };
    });
  };
  drawers.push(() => {
    const hops = hopsOf();
    if (!part.show(hops.length ? "" : "Nothing has been sent in the last step, or no rank has told of it.")) return;
    const bad = (hop) => isNumber(hop.least) && hop.least < hop.speed / 2;
    const worst = hops.filter(bad).sort((a, b) => a.least / a.speed - b.least / b.speed)[0];
    part.readout.replaceChildren(...(worst ? [`rank ${whole(worst.slowest)} over ${worst.link}: `, el("b", {}, `${rate(worst.least)} GB/s`), `, the median is ${rate(worst.speed)}`] : ["no rank's link is much slower than the others'"]));
    const rows = hops.sort((a, b) => b.sent - a.sent).map((hop) => [String(bad(hop)), hop.link, `${hop.lane}: ${String(hop.verb).replace(/_/g, " ")} of ${whole(hop.ranks)}`, bytes(hop.sent), isNumber(hop.time) ? seconds(hop.time) : "–", rate(hop.speed),
      isNumber(hop.least) ? `${whole(hop.slowest)}: ${rate(hop.least)}` : "–"]);
    if (filled === (filled = rows.join("|"))) return;
    body.replaceChildren(...rows.map(([slow, link, hop, ...cells]) => el("tr", { class: slow === "true" ? "bad" : null },
      el("td", { title: `${link}, ${hop} ranks` }, el("span", {}, link), el("small", {}, hop)), cells.map((text, i) => el("td", { class: classOf(i + 1) }, text)))));
  });
}
