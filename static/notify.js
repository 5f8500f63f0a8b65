// The switch for notifications in the bar of every page: whether the browser reports the end of a job while the page is hidden.

import { byId, text } from "./page.js";

const isWanted = () => { try { return localStorage.getItem("notify") === "yes"; } catch { return false; } };
const isOn = () => "Notification" in window && isWanted() && Notification.permission === "granted";

/** Returns why notifications are impossible, with advice; empty if they are possible. */
function findObstacle() {
  if (!isSecureContext) return "Browsers allow notifications only on pages that come over HTTPS or from this machine. This page came over plain HTTP: start the server with --tls-own-ca, or open it as http://127.0.0.1 through a tunnel.";
  if (!("Notification" in window)) return "This browser has no notifications.";
  if (Notification.permission === "denied") return "This browser has been told not to show notifications from this page. Allow them in its settings for this site (mostly behind the icon left of the address), then press the button again.";
  return "";
}

function showObstacle(words) {
  let dialog = byId("notify-dialog");
  if (!dialog) {
    dialog = Object.assign(document.createElement("dialog"), { id: "notify-dialog" });
    dialog.setAttribute("aria-labelledby", "notify-title");
    const close = Object.assign(document.createElement("button"), { type: "button", textContent: "Close" }), actions = Object.assign(document.createElement("div"), { className: "actions" });
    close.addEventListener("click", () => dialog.close());
    actions.append(close);
    dialog.append(Object.assign(document.createElement("h2"), { id: "notify-title", textContent: "No notifications" }), document.createElement("p"), actions);
    document.body.append(dialog);
  }
  text(dialog.querySelector("p"), words);
  dialog.showModal();
}

function draw(button) {
  const on = isOn(), words = on ? "Do not notify me when jobs end" : "Notify me when jobs end";
  button.dataset.on = on ? "yes" : "no";
  button.setAttribute("aria-label", words);
  button.title = on ? "You are notified when a job ends while this page is hidden" : findObstacle() ? "Notifications are not possible here: press to see why" : words;
}

/** Sets up the switch on pages that have it. */
export function notifications() {
  const button = byId("notify");
  if (!button) return;
  button.hidden = false;
  draw(button);
  button.addEventListener("click", async () => {
    const on = isOn();
    let why = on ? "" : findObstacle();
    if (!on && !why) {
      // If the reader closes the browser's question, the permission stays undecided.
      if ((await Notification.requestPermission()) === "denied") why = findObstacle();
    }
    try { localStorage.setItem("notify", !on && !why && Notification.permission === "granted" ? "yes" : "no"); } catch { why ||= "This browser stores nothing for this page, so the choice would be lost on the next page."; }
    draw(button);
    if (why) showObstacle(why);
  });
}
