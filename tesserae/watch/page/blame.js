// Blame.
const blame = $("blame");
// Within a step nothing takes long. Between two of them, where ranks save and evaluate and some wait for others, and in
// the first one, only the job knows whether something happens.
const patience = () => {
  const { now } = known;
  const within = now.step && list(now.ranks).some(({ stage }) => stage && stage !== "between" && stage !== "agree");
  return within || now.hangs ? Math.max(5, 10 * (now.step_seconds || 0)) : Infinity;
};
const trouble = (rank) => {  // what is wrong with what a rank does now; empty: nothing
  const { now, run } = known;
  if (!run || !run.live) return "";
  if (!rank.stage) return now.step || rank.age > 60 ? `after ${duration(rank.age)}` : "";  // not heard of yet
  if (rank.age > 5) return `silent for ${duration(rank.age)}`;
  if (rank.for > 5 && rank.for > patience()) return `for ${duration(rank.for)} in ${rank.stage}`;
  return "";
};
/// What a reader does next; scripts go on as they were written to.
const goesOn = () => {
  const { now } = known;
  return now && now.job && now.job.source === "python" ? "" : " tesserae train CONFIG --resume auto goes on from its last checkpoint.";
};
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1).replace(/\.?$/, ".")}`;
const ending = () => {
  const { run, now } = known, summary = run.summary || {}, how = String((now && now.how) || ""), step = whole(currentStep());
  const figures = [isNumber(summary.val_loss) ? `validation loss ${summary.val_loss.toPrecision(4)}` : isNumber(summary.last_loss) ? `loss ${summary.last_loss.toPrecision(4)}` : "",
    isNumber(summary.tokens_per_second) ? `${count(summary.tokens_per_second)} tokens/s` : ""].filter(Boolean).join(", ");
  const last = "What follows is its last step.", after = `${last}${goesOn()}`;
  const told = (text) => `${text}${figures ? `: ${figures}` : ""}.`;
  switch (endOf()) {
    case "failed": {
      const why = summary.broken_off ? sentence(String(summary.broken_off))
        : how === "failed" || !how ? "Look at the events and at the job's own output."
        : `${sentence(`${how}, and nothing has followed for ${duration(run.silent_seconds)}`)} Look at the events and at the job's own output.`;
      return ["bad", `The run failed after step ${step}.`, `${why} ${after}`];
    }
    case "stopped": {
      const by = summary.stopped_by ? `asked by ${summary.stopped_by}` : how.replace(/^stopped,? ?/, "");
      return ["", `The run was stopped after step ${step}.`, `${told(`It was stopped${by ? `, ${by}` : ""}`)} ${after}`];
    }
    case "again":
      return ["", `The ranks meet again after step ${step}: ${how}.`, "The next step follows, or the run has failed."];
    default:
      return ["good", `The run has ended after step ${step}.`, figures ? `${told("It ended well")} ${last}` : last];
  }
};
const blameLines = () => {
  const { run, now } = known;
  if (!run) return ["", "Connecting …", "", []];
  if (run.ended) return [...ending(), slowLines().map(([head]) => head)];
  if (run.died) {
    return ["bad", `The job has told nothing for ${duration(run.silent_seconds)}.`, `It died, or its host hangs. What follows is what it said last. Look at the events, at the job's own output, and at monitor/stacks-*.txt.${goesOn()}`, slowLines().map(([head]) => `At the end: ${head}`)];
  }
  if (!now && known.dial && !known.curve.step.length) return ["", "The run begins.", "Its ranks tell of themselves once they train.", []];
  if (!now) return ["", "This run has no monitor.", "So there is nothing to say about single ranks. tesserae train writes RUN/monitor by itself; in a script tsm.init does, where run.folder is set.", []];
  const ranks = list(now.ranks), longest = Math.max(0, ...ranks.map((rank) => rank.for || 0));
  const silent = ranks.some((rank) => rank.age > (rank.stage ? 5 : 60));
  if (!now.step && !now.hangs && !silent) return ["", "The first step is not over yet.", "It is often the longest: memory is taken, connections are made.", []];
  const resting = ranks.length && ranks.every((rank) => rank.stage) && !silent && patience() === Infinity;
  if (resting && longest > 5) return ["", `All ranks have been between two steps for ${duration(longest)}.`, "A checkpoint, a validation or a change of degrees takes that long; the next step follows.", []];
  const stuck = ranks.map((rank) => [rank, trouble(rank)]).filter(([, what]) => what);
  if (stuck.length) {
    stuck.sort(([a], [b]) => a.step - b.step || b.age - a.age);
    const working = stuck.filter(([rank]) => !list(now.waits).includes(rank.stage));
    const [rank, what] = working[0] || stuck[0];
    const where = rank.unit ? ` of ${rank.unit}` : "";
    const others = stuck.length - 1, too = others ? ` ${plural(others, "other rank")} ${others === 1 ? "stands" : "stand"} still, too.` : "";
    if (!rank.stage) return ["bad", `Rank ${rank.rank}${hostSuffix(rank.rank)} has not been heard of yet, ${what}.`, `Its process hangs, or its host cannot be reached: look at the job's own output.${too}`, []];
    return ["bad", `Rank ${rank.rank} is stuck${hostSuffix(rank.rank)}: ${what}.`, `It is in step ${whole(rank.step)}, ${rank.stage}${where}.${too}`, []];
  }
  const slow = slowLines();
  if (slow.length) return ["bad", slow[0][0], slow[0][1], slow.slice(1, 6).map(([head]) => head)];
  return ["good", "No rank is slower than the others.", balance(), []];
};
const because = (slow, otherwise) => `${slow.why ? `${sentence(slow.why)} ` : otherwise}Since step ${whole(slow.since)}.`;
const slowLines = () => [...slowRankLines(), ...slowLinkLines()];
const slowLinkLines = () => (known.now && known.now.slow_link ? [known.now.slow_link] : []).map((slow) => [
  `What carries the bytes is slow, in ${slow.stage}: +${seconds(slow.seconds)} a step, ${percent(slow.share)} of the job's time.`,
  `No rank works longer. ${because(slow, "")}`,
]);
const slowRankLines = () => list(known.now && known.now.slow).map((slow) => [
  `Rank ${slow.rank} is slow in ${slow.stage}${hostSuffix(slow.rank)}: +${seconds(slow.seconds)} a step, ${percent(slow.share)} of the job's time.`,
  because(slow, "All others wait for it. "),
]);
const balance = () => {
  const { now } = known;
  const stages = list(now.stages), waits = new Set(list(now.waits)), table = list(now.usual).length ? now.usual : list(now.seconds);
  const totals = stages.map((_, i) => median(table.map((row) => row[i])));
  const all = sum(totals);
  if (!all) return "";
  const waiting = sum(totals.filter((_, i) => waits.has(stages[i]))) / all;
  const most = totals.map((value, i) => [value, stages[i]]).sort((a, b) => b[0] - a[0])[0];
  return `A step is mostly ${most[1]} (${percent(most[0] / all)}); ranks wait for each other ${percent(waiting)} of it.`;
};
const drawBlame = () => {
  const [kind, say, why, more] = blameLines();
  const mark = JSON.stringify([kind, say, why, more]);
  if (blame.dataset.mark === mark) return;
  blame.dataset.mark = mark;
  // Said aloud when the rank or its stage is another one, not with every new figure.
  const slow = list(known.now && known.now.slow)[0], kindOf = [kind, slow && slow.rank, slow && slow.stage].join("/");
  if ($("spoken").dataset.mark !== kindOf) {
    $("spoken").dataset.mark = kindOf;
    set($("spoken"), say);
  }
  blame.className = `card ${kind}`;
  blame.replaceChildren(el("p", { class: "say" }, say), el("p", { class: "why" }, why || "\u00a0"));
  if (more.length) blame.append(el("ul", { class: "more" }, more.map((line) => el("li", {}, line))));
};
drawers.push(drawBlame);
