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

function isAtEnd(box) {
  return box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
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
    const places = [...old.querySelectorAll(".scroll")].map((one) => [one.scrollTop, isAtEnd(one)]);
    old.replaceChildren(...now.childNodes);
    old.querySelectorAll(".scroll").forEach((one, i) => {
      const [top, end] = places[i] || [0, true];
      one.scrollTop = end && one.tagName === "PRE" ? one.scrollHeight : top;
    });
  }
}

// --- Charts --------------------------------------------------------------------------------

const drawn = new Map(); // by title
const TICKS_S = [1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 432000];
const POWERS = Array.from({ length: 9 }, (_, n) => 10 ** n);

function elapsed(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  return `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
}

function short(value) {
  return value === null || value === undefined ? "-" : String(Number(value.toPrecision(5)));
}

function build(chart, place) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, size: 54 };
  const label = chart.axis === "time" ? elapsed : String;
  const series = chart.lines.map((line) => ({
    label: line.name,
    stroke: colour(`--c${line.colour % 6}`),
    width: 1.5,
    dash: line.steps ? [5, 4] : undefined,
    paths: line.steps ? uPlot.paths.stepped({ align: 1 }) : undefined,
    spanGaps: !line.steps,
    points: { show: !line.steps && line.x.length < 3 },
    value: (plot, value) => short(value),
  }));
  const options = {
    width: place.clientWidth, height: 210,
    scales: { x: { time: false } },
    axes: [
      {
        ...axis, size: 28, values: (plot, ticks) => ticks.map(label),
        incrs: chart.axis === "time" ? TICKS_S : [1, 2, 5].flatMap((n) => POWERS.map((p) => n * p)).sort((a, b) => a - b),
      },
      axis,
    ],
    series: [{ label: chart.axis, value: (plot, value) => (value === null ? "-" : label(value)) }, ...series],
  };
  return new uPlot(options, data(chart), place);
}

// Lines have places of their own; where another one has a value, they go on, and where they
// say null, they end.
function data(chart) {
  const tables = chart.lines.map((line) => [line.x, line.y]);
  return uPlot.join(tables, tables.map((table) => table.map(() => 1)));
}

async function draw() {
  const section = document.querySelector("[data-charts]");
  if (!section) return;
  const answer = await fetch(section.dataset.charts, { cache: "no-store" });
  if (!answer.ok) return;
  for (const chart of await answer.json()) {
    const names = chart.lines.map((line) => line.name).join("\n");
    const known = drawn.get(chart.title);
    if (known && known.names === names) {
      known.plot.setData(data(chart));
      continue;
    }
    if (known) known.figure.remove();
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const title = document.createElement("b");
    title.textContent = chart.title;
    caption.append(title);
    figure.append(caption);
    section.append(figure);
    drawn.set(chart.title, { plot: build(chart, figure), names, figure });
  }
}

function redraw() {
  drawn.forEach((one) => { one.plot.destroy(); one.figure.remove(); });
  drawn.clear();
  refresh();
}

window.addEventListener("resize", () => {
  drawn.forEach((one) => one.plot.setSize({ width: one.figure.clientWidth, height: 210 }));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

// --- Changes -------------------------------------------------------------------------------

async function refresh() {
  again = true;
  if (reading) return;
  reading = true;
  while (again) {
    again = false;
    const begun = performance.now();
    try {
      await read();
      await draw();
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
  if (!document.hidden) return // Of a log the end counts.
document.querySelectorAll("pre.scroll").forEach((one) => { one.scrollTop = one.scrollHeight; });
listen();
  if (source) source.close();
  source = null;
});
// Of a log the end counts.
document.querySelectorAll("pre.scroll").forEach((one) => { one.scrollTop = one.scrollHeight; });
listen();
