// Keeps a page as it is on the server: what is marked data-live is replaced when it has changed.
"use strict";

const REST_MS = 400; // between two readings of a page, and
const SHARE = 4; // no more than one part of so many of the time

const connection = document.getElementById("connection");
let source = null;
let reading = false;
let again = false;

function tell(text) {
  connection.textContent = text;
}

async function read() {
  const answer = await fetch(location.href, { cache: "no-store" });
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (!answer.ok) {
    const why = fresh.querySelector(".bad");
    tell(why ? why.textContent : `the panel answers ${answer.status}`);
    return;
  }
  tell("");
  for (const old of document.querySelectorAll("[data-live]")) {
    const now = fresh.getElementById(old.id);
    if (!now || now.innerHTML === old.innerHTML) continue;
    const places = [...old.querySelectorAll(".scroll")].map((one) => one.scrollTop);
    old.replaceChildren(...now.childNodes);
    old.querySelectorAll(".scroll").forEach((one, i) => { one.scrollTop = places[i] || 0; });
  }
}

async function refresh() {
  again = true;
  if (reading) return;
  reading = true;
  while (again) {
    again = false;
    const begun = performance.now();
    try {
      await read();
    } catch {
      tell("the panel does not answer: is 'spottrain ui' still running, and the tunnel up?");
    }
    const took = performance.now() - begun;
    await new Promise((done) => setTimeout(done, Math.max(REST_MS, (SHARE - 1) * took)));
  }
  reading = false;
}

function listen() {
  const changes = document.body.dataset.changes;
  if (!changes || source) return;
  source = new EventSource(changes);
  source.onmessage = refresh;
  source.onerror = () => tell("the panel does not answer: is 'spottrain ui' still running, and the tunnel up?");
}

// A tab that nobody sees costs nothing.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return listen();
  if (source) source.close();
  source = null;
});
listen();
