"use strict";
let data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

function make(parent, name, attributes = {}, text = null, space = null) {
  const element = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  parent.appendChild(element);
  return element;
}

function short(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

function niceTicks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw) || raw;
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const decades = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) decades.push(power);
  const factors = decades.length > 4 ? [1] : [1, 2, 5];
  return decades.flatMap((power) => factors.map((factor) => factor * Math.pow(10, power))).filter((tick) => tick >= low && tick <= high);
}

// An exponential moving average over about a twentieth of the curve.
function smoothed(points) {
  const keep = Math.exp(-20 / Math.max(20, points.length));
  let sum = 0, weight = 0;
  return points.map(([step, value]) => {
    if (value === null) return [step, null];
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return [step, sum / weight];
  });
}

function scaleOf(chart, options) {
  const values = chart.series.flatMap((line) => line.points.map((point) => point[1])).concat(chart.rules.map((rule) => rule.value));
  const finite = values.filter((value) => value !== null);
  const isLog = options.log && !chart.zero && finite.length > 0 && finite.every((value) => value > 0);
  let low = Math.min(...finite), high = Math.max(...finite);
  if (!finite.length) { low = 0; high = 1; }
  if (chart.zero) low = 0;
  if (isLog) { if (low === high) { low /= 2; high *= 2; } else { low /= 1.1; high *= 1.1; } }
  else {
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    if (!chart.zero) low = low >= 0 && low - room < 0 ? 0 : low - room;
    high += room;
  }
  const unit = isLog ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
  return { unit, ticks: isLog ? logTicks(low, high) : niceTicks(low, high, 4) };
}

function drawChart(card, chart, options) {
  card.textContent = "";
  make(card, "h3", {}, chart.title);
  const width = Math.max(240, card.clientWidth - 24), height = 196;
  const box = { left: 60, right: width - 8, top: 8, bottom: height - 36 };
  const svg = make(card, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": chart.title }, null, SVG);
  const keys = make(card, "div", { class: "keys" });
  const steps = chart.series.flatMap((line) => line.points.map((point) => point[0]));
  const first = Math.min(...steps), last = Math.max(...steps);
  const x = (step) => box.left + (last === first ? 0.5 : (step - first) / (last - first)) * (box.right - box.left);
  const scale = scaleOf(chart, options);
  const y = (value) => box.bottom - scale.unit(value) * (box.bottom - box.top);

  for (const tick of scale.ticks) {
    make(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }, null, SVG);
    make(svg, "text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick), SVG);
  }
  const stepTicks = last === first ? [first] : niceTicks(first, last, Math.max(2, Math.floor(width / 110)));
  for (const tick of stepTicks) {
    const anchor = x(tick) > box.right - 20 ? "end" : x(tick) < box.left + 12 ? "start" : "middle";
    make(svg, "text", { x: x(tick), y: height - 20, "text-anchor": anchor }, tick.toLocaleString("en"), SVG);
  }
  make(svg, "text", { class: "axis", x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, "step", SVG);
  const middle = (box.top + box.bottom) / 2;
  make(svg, "text", { class: "axis", x: 10, y: middle, "text-anchor": "middle", transform: `rotate(-90 10 ${middle})` }, chart.axis, SVG);
  for (const [number, rule] of chart.rules.entries()) {
    make(svg, "line", { class: "rule", x1: box.left, x2: box.right, y1: y(rule.value), y2: y(rule.value) }, null, SVG);
    const above = y(rule.value) - 5 > box.top + 6;
    make(svg, "text", { class: "rule-label", x: box.right - 2 - number * Math.min(190, (box.right - box.left) / chart.rules.length), y: y(rule.value) + (above ? -5 : 14), "text-anchor": "end" }, `${rule.label} ${short(rule.value)}`, SVG);
  }
  for (const line of chart.series) {
    if (options.smooth && line.points.length > 20) {
      drawLine(svg, line, line.points, x, y, "raw");
      drawLine(svg, line, smoothed(line.points), x, y, "");
    } else drawLine(svg, line, line.points, x, y, "");
  }
  addReader(svg, keys, chart, box, x, first, last);
}

function drawLine(svg, line, points, x, y, kind) {
  let path = "", isDown = false, run = 0;
  points.forEach(([step, value], place) => {
    if (value === null) { isDown = false; return; }
    path += `${isDown ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    run = isDown ? run + 1 : 1;
    isDown = true;
    const isAlone = run === 1 && (place === points.length - 1 || points[place + 1][1] === null);
    if (isAlone || points.length <= 12) make(svg, "circle", { class: `f${line.colour % 6}`, cx: x(step), cy: y(value), r: 2.6 }, null, SVG);
  });
  const dash = DASHES[line.dash % DASHES.length];
  if (path) make(svg, "path", { class: `s${line.colour % 6} ${kind}`, d: path, "stroke-dasharray": dash }, null, SVG);
}

// The legend is also the readout: it shows the values under the pointer, or the newest ones.
function addReader(svg, keys, chart, box, x, first, last) {
  const hair = make(svg, "line", { class: "hair", y1: box.top, y2: box.bottom, visibility: "hidden" }, null, SVG);
  const show = (step) => {
    keys.textContent = "";
    for (const line of chart.series) {
      const point = step === null ? line.points[line.points.length - 1] : line.points.reduce((best, other) => (Math.abs(other[0] - step) < Math.abs(best[0] - step) ? other : best));
      const key = make(keys, "span");
      make(key, "i", { class: `swatch c${line.colour % 6}` });
      key.append(`${line.label} `);
      make(key, "b", {}, short(point[1]));
    }
    if (step !== null) make(keys, "span", {}, `step ${Math.round(step).toLocaleString("en")}`);
  };
  show(null);
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const place = ((event.clientX - frame.left) / frame.width) * svg.viewBox.baseVal.width;
    const share = Math.min(1, Math.max(0, (place - box.left) / (box.right - box.left)));
    const wanted = first + share * (last - first);
    const points = chart.series[0].points;
    const step = points.reduce((best, other) => (Math.abs(other[0] - wanted) < Math.abs(best - wanted) ? other[0] : best), points[0][0]);
    hair.setAttribute("x1", x(step));
    hair.setAttribute("x2", x(step));
    hair.setAttribute("visibility", "visible");
    show(step);
  });
  svg.addEventListener("pointerleave", () => { hair.setAttribute("visibility", "hidden"); show(null); });
}

function drawAll() {
  const options = { log: document.getElementById("log").checked, smooth: document.getElementById("smooth").checked };
  for (const [id, charts] of [["curve-charts", data.curves], ["memory-charts", data.memory]]) {
    const place = document.getElementById(id);
    // Charts come and go while a run is followed, so the cards are rebuilt whenever their titles change.
    const titles = JSON.stringify(charts.map((chart) => [chart.group, chart.title]));
    if (place.dataset.titles !== titles) place.textContent = "";
    place.dataset.titles = titles;
    const isFirst = place.children.length === 0, hasGroups = new Set(charts.map((chart) => chart.group)).size > 1;
    charts.forEach((chart, number) => {
      if (isFirst && hasGroups && (number === 0 || charts[number - 1].group !== chart.group)) make(place, "h3", { class: "group" }, chart.group);
      if (isFirst) make(place, "div", { class: "card chart" });
    });
    // The cards have their final widths only once all of them are on the page.
    place.querySelectorAll(".chart").forEach((card, number) => drawChart(card, charts[number], options));
  }
  document.getElementById("curves").hidden = data.curves.length === 0;
}

document.getElementById("log").addEventListener("change", drawAll);
document.getElementById("smooth").addEventListener("change", drawAll);
let drawnWidth = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== drawnWidth) { drawnWidth = window.innerWidth; drawAll(); }
});
drawAll();
