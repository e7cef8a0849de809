// What the ranks are: an axis for all charts that have a column a rank.
const ranksOf = () => (known.now && known.now.job && known.now.job.ranks) || list(known.now && known.now.seconds).length;
const hostOf = (rank) => {
  const job = (known.now && known.now.job) || {};
  const host = list(job.hosts)[rank];
  return host === undefined ? "" : list(job.host_names)[host] || `host ${host}`;
};
const hostSuffix = (rank) => (new Set(list(known.now && known.now.job && known.now.job.hosts)).size > 1 ? ` on host ${hostOf(rank)}` : "");
const rankAxis = (pen, left, width, top, ranks) => {
  const cell = width / ranks, job = (known.now && known.now.job) || {};
  pen.fillStyle = theme.dim;
  pen.textAlign = "center";
  const each = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 250, 500, 512, 1000, 2000, 5000, 10000].find((n) => n * cell >= 34) || ranks;
  for (let rank = 0; rank < ranks; rank += each) {
    pen.fillText(String(rank), left + (rank + 0.5) * cell, top + 9);
  }
  const hosts = list(job.hosts);
  if (new Set(hosts).size < 2) return;
  let begin = 0;
  for (let rank = 1; rank <= ranks; rank++) {
    if (rank < ranks && hosts[rank] === hosts[begin]) continue;
    const wide = (rank - begin) * cell;
    const named = hostOf(begin), name = wide > pen.measureText(`host ${named}`).width + 10 ? `host ${named}` : named;
    if (wide > 3) {
      pen.fillStyle = theme.line;
      pen.fillRect(left + begin * cell + 1, top + 18, Math.max(1, wide - 2), 1);
    }
    if (wide > pen.measureText(name).width + 10) {
      pen.fillStyle = theme.faint;
      pen.fillText(name, left + begin * cell + wide / 2, top + 28);
    }
    begin = rank;
  }
};
