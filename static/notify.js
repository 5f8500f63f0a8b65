// The switch for notifications in the bar of every page: whether the browser reports the end of a job while the page is hidden.

import { byId, isNotifying, make, openDialog, store } from "./page.js";

/** Returns why notifications are impossible, with advice; empty if they are possible. */
function findObstacle() {
  if (!isSecureContext) return "Browsers allow notifications only on pages that come over HTTPS or from this machine. This page came over plain HTTP: start the server with --tls-own-ca, or open the page as http://127.0.0.1 through a tunnel.";
  if (!("Notification" in window)) return "This browser has no notifications.";
  if (Notification.permission === "denied") return "This browser has been told not to show notifications from this page. Allow them in its settings for this site (mostly behind the icon left of the address), then press the button again.";
  return "";
}

function draw(button) {
  const isOn = isNotifying(), label = isOn ? "Do not notify me when jobs end" : "Notify me when jobs end";
  button.dataset.on = isOn ? "yes" : "no";
  button.setAttribute("aria-label", label);
  button.title = isOn ? "You are notified when a job ends while this page is hidden" : findObstacle() ? "Notifications are not possible here: press to see why" : label;
}

/** Sets up the switch on pages that have it. */
export function setUpNotifications() {
  const button = byId("notify");
  if (!button) return;
  button.hidden = false;
  draw(button);
  button.addEventListener("click", async () => {
    const wasOn = isNotifying();
    let why = wasOn ? "" : findObstacle();
    // If the reader closes the browser's question, the permission stays undecided.
    if (!wasOn && !why && (await Notification.requestPermission()) === "denied") why = findObstacle();
    if (!store("notify", !wasOn && !why && Notification.permission === "granted" ? "yes" : "no")) why ||= "This browser stores nothing for this page, so the choice would be lost on the next page.";
    draw(button);
    if (why) openDialog("notify-dialog", "No notifications", [make("p", { textContent: why })]);
  });
}
