// Requests the first chart's history while the page's other scripts are loading. The width is that of the chart in styles/job.css.
{
  const wide = innerWidth > 1240 ? Math.min(innerWidth, 1800) / 2 - 85 : innerWidth - 120;
  const points = Math.round(Math.max(100, wide) * Math.min(2, devicePixelRatio || 1));
  window.early = fetch(`/api/v1/jobs/${location.pathname.split("/")[2]}/metrics?name=loss&points=${points}`, { headers: { accept: "application/json" } })
    .then((response) => (response.ok ? response.json() : null)).catch(() => null);
}
