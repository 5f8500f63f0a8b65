// Requests the first chart's history while the page's other scripts are loading. The chart's width follows from the breakpoint of 1240 px in
// styles/job.css and the page's maximum of 1800 px in styles/base.css, less the space beside the plot.
{
  const wide = innerWidth > 1240 ? Math.min(innerWidth, 1800) / 2 - 85 : innerWidth - 120;
  const points = Math.round(Math.max(100, wide) * Math.min(2, devicePixelRatio || 1));
  // A promise of the response, or of null, for job/metrics.js.
  window.earlyLoss = fetch(`/api/v1/jobs/${location.pathname.split("/")[2]}/metrics?name=loss&points=${points}`, { headers: { accept: "application/json" } })
    .then((response) => (response.ok ? response.json() : null)).catch(() => null);
}
