// Requests the points of the loss chart while the page's other scripts are loading. The chart is not laid out yet, so the width of its plot is
// computed: above 1240 px, the chart has half of the page (styles/job.css), and the page is at most 1800 px wide (styles/base.css). The space
// beside the plot is 85 or 120 px.
{
  const width = innerWidth > 1240 ? Math.min(innerWidth, 1800) / 2 - 85 : innerWidth - 120;
  const points = Math.round(Math.max(100, width) * Math.min(2, devicePixelRatio || 1));
  // A promise of the response, or of null if the request fails. job/metrics.js uses the response.
  window.earlyLoss = fetch(`/api/v1/jobs/${location.pathname.split("/")[2]}/metrics?name=loss&points=${points}`, { headers: { accept: "application/json" } })
    .then((response) => (response.ok ? response.json() : null)).catch(() => null);
}
