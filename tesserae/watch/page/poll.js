// The server.
const ask = (path, headers = {}) => fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(10000) });
const asJson = async (answer) => { try { return answer.ok ? await answer.json() : null; } catch { return null; } };
// Whole lines of a file from where the last answer ended. Returns true if there is more.
const readLines = async (path, key, begin, take) => {
  const answer = await ask(`${path}?from=${known[key] || 0}&mark=${known.marks[key] || ""}`);
  if (!answer.ok) return false;
  const from = Number(answer.headers.get("X-From")), next = Number(answer.headers.get("X-Next")), size = Number(answer.headers.get("X-Size"));
  if (from === 0 && known[key]) begin();  // another file
  for (const line of (await answer.text()).split("\n")) {
    if (!line) continue;
    try { take(JSON.parse(line)); } catch { /* half of a line that was too long */ }
  }
  const moved = next > (from === 0 ? 0 : known[key]);
  known[key] = next;
  known.marks[key] = answer.headers.get("X-Mark");
  known.share = size ? next / size : 1;
  return moved && next < size;
};
const clearCurve = () => { known.measured.clear(); for (const name of ["step", "loss", "speed", "seconds", "valStep", "val"]) known.curve[name].length = 0; };
const takeMetrics = (line) => {
  const curve = known.curve;
  if (!isNumber(line.step)) return;
  // A job that went on from an earlier step says those after it again.
  while (curve.step.length && lastOf(curve.step) >= line.step) ["step", "loss", "speed", "seconds"].forEach((name) => curve[name].pop());
  while (curve.valStep.length && lastOf(curve.valStep) >= line.step) { curve.valStep.pop(); curve.val.pop(); }
  curve.step.push(line.step);
  curve.loss.push(isNumber(line.loss) ? line.loss : NaN);
  curve.speed.push(isNumber(line.tokens_per_second) ? line.tokens_per_second : NaN);
  curve.seconds.push(isNumber(line.step_ms) ? line.step_ms / 1e3 : NaN);
  if (isNumber(line.val_loss)) { curve.valStep.push(line.step); curve.val.push(line.val_loss); }
  if (list(line.degrees).length !== 3) return;
  const layout = line.degrees.join(" · ");
  if (!known.measured.has(layout)) known.measured.set(layout, []);
  const steps = known.measured.get(layout);
  steps.push([line.tokens_per_second, line.memory_bytes]);
  if (steps.length > 100) steps.shift();
  curve.degrees = line.degrees;
};
const readNow = async () => {
  if (!known.run.has.now) { known.now = null; known.nowTag = ""; return; }
  const answer = await ask("api/now", known.nowTag ? { "If-None-Match": known.nowTag } : {});
  if (answer.status === 304) return;
  const now = await asJson(answer);
  if (now || answer.status === 404) { known.now = now; known.nowTag = now ? answer.headers.get("ETag") : ""; }
};
const readTimeline = async () => {
  const step = known.now ? known.now.step : 0, [from, count] = known.timelineRange();
  if (known.holdTimeline && known.timelineStep >= 0) return;
  if (!known.run.has.timeline || (known.timelineStep === step && known.timeline)) return;
  const answer = await ask(`api/timeline?from=${from}&count=${count}`);
  if (answer.ok) known.timeline = await asJson(answer);
  known.timelineStep = known.timeline && known.timeline.step === step ? step : -1;
};
let turns = 0, polling = false, timer = 0;
const offline = (why) => {
  const node = $("offline");
  node.hidden = !why;
  set(node, why);
  document.body.classList.toggle("stale", Boolean(why));
};
const poll = async () => {
  clearTimeout(timer);
  if (polling) return;
  polling = true;
  try {
    const answer = await ask("api/run");
    if (answer.status === 401) throw new Error("This page needs its token: open the whole address that was printed.");
    const run = await asJson(answer);
    if (!run) throw new Error(`The server answers with ${answer.status}.`);
    if (known.run && (known.run.folder !== run.folder)) location.reload();  // another run at the same port
    known.run = run;
    offline("");
    await readNow();
    await readLines("api/events", "eventsNext", () => { known.events.length = 0; }, (event) => known.events.push(event));
    let more = true;
    for (let part = 0; more && part < 1000; part++) {
      known.loading = known.curve.step.length ? null : 0;
      more = await readLines("api/metrics", "metricsNext", clearCurve, takeMetrics);
      if (more && part % 4 === 0) drawAll();
    }
    known.loading = null;
    await readTimeline();
    if (turns % 3 === 0) known.dial = (run.live || !run.has.now) && !run.ended && run.has.dial ? await asJson(await ask("api/dial")) : null;
    known.heard = Date.now();
  } catch (error) {
    const since = known.heard ? ` What follows is ${duration((Date.now() - known.heard) / 1e3)} old.` : "";
    offline(error.message.startsWith("Th") ? error.message : `The server does not answer: tesserae watch has ended, or the network is gone. Trying again …${since}`);
  }
  polling = false;
  turns++;
  drawAll();
  clearTimeout(timer);
  timer = setTimeout(poll, document.hidden ? 5000 : 1000);
};

$("theme").addEventListener("click", () => {
  // To the other one; back to the one of the system means to follow it.
  const shown = document.documentElement.dataset.theme, other = shown === "dark" ? "light" : "dark";
  chosenTheme = (other === "dark") === systemDark.matches ? "system" : other;
  try { localStorage.setItem("tesserae-theme", chosenTheme); } catch { /* a private window keeps nothing */ }
  applyTheme();
});
systemDark.addEventListener("change", applyTheme);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
// The token goes from the address to a cookie, so that it is not in a bookmark or over a shoulder.
if (location.search.includes("token=")) history.replaceState(null, "", location.pathname);
applyTheme();
poll();
