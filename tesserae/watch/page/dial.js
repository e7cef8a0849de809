// The dial.
{
  const part = section("dial", "The dial");
  const buttons = el("div", { class: "degrees", role: "group", "aria-label": "Over how many ranks the state is sharded" });
  const hint = el("p", { class: "hint" }), detail = el("dl"), answer = el("p", { class: "answer", role: "status" });
  const tableBody = el("tbody"), layouts = el("div", { class: "scroll" }, el("table", { class: "layouts" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "P · G · O"), el("th", { scope: "col", class: "num" }, "tokens/s, estimated"), el("th", { scope: "col", class: "num" }, "measured"), el("th", { scope: "col", class: "num" }, "memory, estimated"), el("th", { scope: "col", class: "num" }, "measured"))), tableBody));
  part.body.append(buttons, hint, layouts, detail, answer);
  let listed = "";
  // Every layout: what it would give by the run's own estimate, and what its steps gave so far.
  const drawLayouts = (dial, now, may) => {
    const all = list(dial && dial.layouts), { speed, seconds: took } = known.curve;
    const usual = median(took.slice(-20)), tokens = median(speed.slice(-20)) * usual;
    // The run estimates from its last step, which may have been an unusual one.
    const more = dial && isNumber(dial.step_seconds) ? usual - dial.step_seconds : 0;
    const rows = (all.length ? all.map((each) => each.degrees.join(" · ")) : [...known.measured.keys()]).map((layout, i) => {
      const steps = (known.measured.get(layout) || []).slice(3), measured = steps.length > 2;
      const estimated = all[i];
      return [layout, estimated ? count(tokens / Math.max(estimated.step_seconds + more, usual / 100)) : "–", measured ? count(median(steps.map((step) => step[0]))) : "–",
        estimated ? bytes(estimated.memory_bytes) : "–", measured ? bytes(median(steps.map((step) => step[1]))) : "–"];
    });
    const mark = JSON.stringify([rows, now, may]);
    if (mark === listed) return;
    listed = mark;
    layouts.hidden = !rows.length;
    tableBody.replaceChildren(...rows.map((row) => el("tr", { class: row[0] === now ? "now" : null },
      el("td", {}, may && row[0] !== now ? el("button", { class: "btn", type: "button", title: `Change to ${row[0]}`, onclick: () => turn({ degrees: row[0].split(" · ").map(Number) }, row[0]) }, row[0]) : row[0]),
      row.slice(1).map((cell) => el("td", { class: "num" }, cell)))));
  };
  let made = "";
  const turn = async (asked, words) => {
    set(answer, `Asking for ${words} …`);
    try {
      const got = await fetch("api/dial", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked), signal: AbortSignal.timeout(8000) });
      const said = await got.json();
      set(answer, got.ok ? { accepted: `The run changes to ${words} at the end of this step.`, unchanged: `${words}: as it was.`, automatic: "The run chooses its degrees itself from now on." }[said.event] || JSON.stringify(said) : said.message || said.error || `refused (${got.status})`);
    } catch (error) {
      set(answer, `Nobody answered (${error.name}); the run may still do it.`);
    }
  };
  drawers.push(() => {
    const { run, now, dial, curve } = known;
    const job = (now && now.job) || {};
    const axes = job.axes || {};
    const ranks = (dial && dial.ranks) || Math.round((job.ranks || 0) / (axes.tensor || 1));
    if (!part.show(ranks && run ? "" : "A run tells its degrees here once its first step is over.")) return;
    const degrees = list((dial && dial.degrees) || curve.degrees || job.degrees);
    const one = degrees.length === 3 && new Set(degrees).size === 1 ? degrees[0] : 0;
    const choices = [];
    for (let degree = 1; degree <= ranks; degree++) if (ranks % degree === 0) choices.push(degree);
    const may = Boolean(run.allow_control && dial);
    const automatic = Boolean(dial && dial.automatic);
    const mark = JSON.stringify([choices, one, may, automatic]);
    if (mark !== made) {
      made = mark;
      buttons.replaceChildren(...choices.map((degree) => el("button", {
        class: "btn", type: "button", "aria-pressed": String(degree === one), disabled: !may,
        title: degree === 1 ? "1: every rank holds all state (DDP)" : degree === ranks ? `${degree}: full sharding (ZeRO-3)` : `All state over ${degree} ranks, ${ranks / degree} copies`,
        onclick: () => turn({ degree }, `degree ${degree}`),
      }, String(degree))), el("button", { class: "btn", type: "button", disabled: !may, "aria-pressed": String(automatic), title: "The run measures and chooses by itself", onclick: () => turn({ auto: true }, "the automatic choice") }, "auto"));
    }
    drawLayouts(dial, degrees.join(" · "), may);
    const tiers = (dial && dial.offload) || job.offload || {};
    const away = Object.entries(tiers).filter(([, tier]) => tier !== "device");
    set(part.readout, degrees.length === 3 ? `P ${degrees[0]} · G ${degrees[1]} · O ${degrees[2]}${away.map(([state, tier]) => ` · ${state} on ${tier}`).join("")}` : "");
    hint.innerHTML = !run.live && !dial ? "The job does not run: its dial cannot be turned." : !dial ? "No run listens at <code>dial.sock</code> from here: it trains on another host, or as another user." : !run.allow_control ? "Only shown: start <code>tesserae watch</code> with <code>--allow-control</code> to turn it here." : "The state of parameters, gradients and optimizer over so many ranks: more ranks, less memory, more traffic. It changes at the end of a step, and training goes on with the same numbers.";
    const facts = [];
    if (dial && isNumber(dial.step_seconds)) facts.push(["a step", seconds(dial.step_seconds)]);
    if (dial && isNumber(dial.memory_bytes)) facts.push(["fullest rank", bytes(dial.memory_bytes)]);
    if (dial && isNumber(dial.place_bytes) && dial.place_bytes > 0 && isNumber(dial.free_bytes)) facts.push(["memory free", percent(dial.free_bytes / dial.place_bytes)]);
    const process = (now && now.process) || {};
    if (process.host) facts.push(["rank 0 is", `process ${process.pid} on ${process.host}`]);
    const many = Object.entries(axes).filter(([, size]) => size > 1).map(([name, size]) => `${name} ${size}`);
    if (many.length) facts.push(["other axes", many.join(", ")]);
    const change = dial && dial.last_change;
    if (change && list(change.from).length) facts.push(["last change", `step ${whole(change.step)}: ${change.from.join("·")} → ${change.to.join("·")} in ${seconds(change.seconds)}`]);
    const text = JSON.stringify(facts);
    if (detail.dataset.mark !== text) {
      detail.dataset.mark = text;
      detail.replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
    }
  });
}
