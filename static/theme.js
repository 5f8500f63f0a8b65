// Sets the theme before the first paint: the system's theme, unless the reader chose a theme. This is a classic script, so that it runs
// before the body is drawn.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const read = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const chosen = read();
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
    const nameButton = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Use the ${isDark() ? "light" : "dark"} theme`); };
    button.hidden = false;
    nameButton();
    system.addEventListener("change", nameButton);
    button.addEventListener("click", () => {
      const wanted = isDark() ? "light" : "dark";
      // If the chosen theme is the system's theme, the page follows the system again.
      const followsSystem = (wanted === "dark") === system.matches;
      if (followsSystem) delete root.dataset.theme; else root.dataset.theme = wanted;
      try { if (followsSystem) localStorage.removeItem("theme"); else localStorage.setItem("theme", wanted); } catch { /* Without storage, the theme lasts as long as the page. */ }
      nameButton();
    });
    // The reader chose a theme in another tab.
    addEventListener("storage", (e) => {
      if (e.key !== "theme") return;
      if (e.newValue) root.dataset.theme = e.newValue; else delete root.dataset.theme;
      nameButton();
    });
  });
})();
