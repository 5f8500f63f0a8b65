// The frame around the data: grid, tick labels and the marks where an attempt starts.

/** Draws grid and labels into `plot` ({left, top, right, bottom} in pixels). */
export function drawAxes(ctx, plot, { x, y, xTicks, yTicks, xLabel, yLabel, colours }) {
  ctx.font = colours.font;
  ctx.lineWidth = 1;
  ctx.strokeStyle = colours.grid;
  ctx.fillStyle = colours.muted;
  const crisp = (p) => Math.round(p) + 0.5;
  ctx.beginPath();
  for (const t of yTicks) { const p = crisp(y.to(t)); ctx.moveTo(plot.left, p); ctx.lineTo(plot.right, p); }
  for (const t of xTicks) { const p = crisp(x.to(t)); ctx.moveTo(p, plot.top); ctx.lineTo(p, plot.bottom); }
  ctx.stroke();

  ctx.textBaseline = "middle";
  ctx.textAlign = "right";
  for (const t of yTicks) ctx.fillText(yLabel(t), plot.left - 8, y.to(t));
  ctx.textBaseline = "top";
  ctx.textAlign = "center";
  let taken = -Infinity;
  for (const t of xTicks) {
    const text = xLabel(t), half = ctx.measureText(text).width / 2;
    const p = Math.min(Math.max(x.to(t), half), plot.right + plot.margin - half);
    if (p - half < taken + 10) continue;
    taken = p + half;
    ctx.fillText(text, p, plot.bottom + 7);
  }
}

/** A thin mark with its number at the first step of every attempt but the first. */
export function drawAttempts(ctx, plot, x, starts, colours) {
  ctx.font = colours.font;
  for (const { attempt, at } of starts) {
    const p = Math.round(x.to(at)) + 0.5;
    if (!(p >= plot.left && p <= plot.right)) continue;
    ctx.strokeStyle = colours.muted;
    ctx.globalAlpha = 0.7;
    ctx.setLineDash([2, 3]);
    ctx.beginPath();
    ctx.moveTo(p, plot.top);
    ctx.lineTo(p, plot.bottom);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.globalAlpha = 1;
    ctx.fillStyle = colours.muted;
    ctx.textBaseline = "top";
    const right = p + 60 > plot.right;
    ctx.textAlign = right ? "right" : "left";
    ctx.fillText(`attempt ${attempt}`, right ? p - 4 : p + 4, plot.top + 2);
  }
}

/** Pixels that the widest of `labels` needs, at least `least`. */
export function labelWidth(ctx, labels, colours, least) {
  ctx.font = colours.font;
  return Math.ceil(Math.max(least, ...labels.map((l) => ctx.measureText(l).width)));
}
