// Header.
const facts = {};
const fact = (key, label) => {
  const value = el("b", {}, "–");
  $("facts").append(el("div", { class: "fact" }, el("span", {}, label), value));
  facts[key] = value;
};
[["step", "step"], ["left", "time left"], ["speed", "tokens/s"], ["time", "a step"], ["loss", "loss"], ["degrees", "degrees P · G · O"], ["ranks", "ranks"], ["size", "parameters"]].forEach(([key, label]) => fact(key, label));

const lastOf = (values) => values[values.length - 1];
const currentStep = () => Math.max((known.now && known.now.step) || 0, lastOf(known.curve.step) || 0);
const totalSteps = () => {
  const { now, run } = known;
  if (now && now.job && isNumber(now.job.steps)) return now.job.steps;
  return run && run.config && run.config.train && isNumber(run.config.train.steps) ? run.config.train.steps : null;
};
const stepSeconds = () => {
  const recent = median(known.curve.seconds.slice(-32));
  return isNumber(recent) ? recent : known.now && known.now.step_seconds;
};
// What became of a run that has ended: "again" where its ranks meet again, as they do after a loss, until that takes too
// long. A script has no summary, a run without a monitor nothing else.
const endOf = () => {
  const { run, now } = known, summary = run.summary || {}, how = String((now && now.how) || "");
  if (how === "failed" || summary.broken_off) return "failed";
  if (how.startsWith("stopped") || summary.stopped_by_signal) return "stopped";
  if (!how || how === "done") return "done";
  return run.silent_seconds < 60 ? "again" : "failed";
};
const endStates = { failed: ["died", "failed"], stopped: ["ended", "stopped"], again: ["", "ranks meet again"], done: ["ended", "ended"] };
const stateOf = () => {
  const { run, now } = known;
  if (!run) return ["", "connecting"];
  if (run.live) return ["live", now && now.step === 0 ? "starting" : "running"];
  if (!run.has.now && known.dial) return ["live", "running"];  // without a monitor; somebody turns the dial
  if (run.ended) return endStates[endOf()];
  return run.died ? ["died", `died? silent for ${duration(run.silent_seconds)}`] : ["", "no monitor"];
};
const drawHeader = () => {
  const { run, now, curve } = known;
  const job = (now && now.job) || {};
  if (run) {
    set($("name"), run.name || "run");
    set($("place"), "\u200e" + run.folder);
    $("place").title = run.folder;
  }
  const [kind, text] = stateOf();
  $("state").className = `pill ${kind}`;
  set($("state").lastChild, text);
  const step = currentStep(), total = totalSteps(), each = stepSeconds();
  document.title = run ? `${run.name}${total ? ` · ${Math.floor((100 * step) / total)} %` : ""} · ${text}` : "Tesserae";
  set(facts.step, total ? `${whole(step)} of ${whole(total)}` : whole(step));
  const live = stateOf()[0] === "live";
  set(facts.left, live && total && isNumber(each) && step ? (step >= total ? "–" : duration((total - step) * each)) : "–");
  const speed = median(curve.speed.slice(-8));
  set(facts.speed, isNumber(speed) ? count(speed) : isNumber(job.tokens_per_step) && isNumber(each) ? count(job.tokens_per_step / each) : "–");
  set(facts.time, seconds(each));
  set(facts.loss, isNumber(lastOf(curve.loss)) ? lastOf(curve.loss).toPrecision(4) : "–");
  const degrees = (known.dial && known.dial.degrees) || curve.degrees || job.degrees;
  set(facts.degrees, list(degrees).length === 3 ? degrees.join(" · ") : "–");
  const hosts = new Set(list(job.hosts)).size;
  set(facts.ranks, job.ranks ? `${whole(job.ranks)}${hosts > 1 ? ` on ${hosts} hosts` : ""}${job.device ? `, ${job.device}` : ""}` : "–");
  set(facts.size, isNumber(job.parameters) ? count(job.parameters) : "–");
  const share = total ? clamp(step / total, 0, 1) : 0;
  $("progress").firstChild.style.width = `${100 * share}%`;
  $("progress").setAttribute("aria-valuenow", Math.round(100 * share));
};
drawers.push(drawHeader);
