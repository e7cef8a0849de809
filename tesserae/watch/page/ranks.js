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
// A row of a table by rank: what an entry has for each, coloured by how far that is from its middle.
const rankRow = (pen, entry, left, y, row, cell, ranks, print) => {
  const shade = (off) => mix(theme.mid, off < 0 ? theme.cold : theme.warm, clamp(Math.abs(off) / entry.full, 0, 1) ** 0.85);
  pen.textAlign = "left";
  pen.fillStyle = entry.color;
  pen.fillRect(0, y + row / 2 - 5, 4, 10);
  pen.fillStyle = theme.text;
  pen.fillText(entry.name, 10, y + row / 2);
  if (entry.waits) { pen.fillStyle = theme.dim; pen.fillText("wait", 12 + pen.measureText(`${entry.name} `).width, y + row / 2 + 0.5); }
  if (cell < 2) {  // ranks share pixels: the one that is furthest off shows
    for (let pixel = 0; pixel < Math.floor(cell * ranks); pixel++) {
      let worst = 0;
      for (let rank = Math.floor(pixel / cell); rank < Math.min(ranks, Math.floor((pixel + 1) / cell) + 1); rank++) {
        const off = entry.values[rank] - entry.middle;
        if (Math.abs(off) > Math.abs(worst)) worst = off;
      }
      pen.fillStyle = shade(worst);
      pen.fillRect(left + pixel, y + 1, 1, row - 2);
    }
    return;
  }
  const gap = cell > 6 ? 1 : 0;
  for (let rank = 0; rank < ranks; rank++) {
    const value = entry.values[rank], off = value - entry.middle, x = left + rank * cell;
    pen.fillStyle = isNumber(value) ? shade(off) : theme.soft;
    pen.fillRect(x, y + 1, cell - gap, row - 2);
    if (!print || !isNumber(value)) continue;
    pen.fillStyle = Math.abs(off) > entry.full / 2 ? theme.ink : theme.dim;
    pen.textAlign = "center";
    pen.fillText(print(entry, value), x + (cell - gap) / 2, y + row / 2 + 0.5);
  }
};
const frameCell = (pen, left, y, row, cell, rank, color) => {
  const wide = Math.max(cell - 1, 4);
  pen.strokeStyle = color;
  pen.lineWidth = 2;
  pen.strokeRect(left + (rank + 0.5) * cell - wide / 2, y + 1, wide, row - 2);
};
