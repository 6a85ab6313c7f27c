// Each volume is one image of tiles. Its pixels are read once; every plane is then cut from them.
const PLANES = [
  { axis: 2, name: "axial" },
  { axis: 1, name: "coronal" },
  { axis: 0, name: "sagittal" },
];
const OPPOSITE = { L: "R", R: "L", A: "P", P: "A", S: "I", I: "S" };
const TALLEST = { gallery: 330, closer: 440 };
const loaded = new Map();
// `at` is the crosshair as a share of each axis; the window is a share of the intensity range.
const view = { axis: 2, at: [0.5, 0.5, 0.5], level: 0.5, width: 1, gain: 4, isExact: false, hasHair: true, isRadiological: false, chosen: null, ticket: 0 };
let tiles = [];
const byId = (id) => document.getElementById(id);

async function bytesOf(volume) {
  const source = data.pictures[volume.picture];
  if (!loaded.has(source)) {
    const picture = new Image();
    picture.src = source;
    await picture.decode();
    const canvas = document.createElement("canvas");
    canvas.width = picture.naturalWidth;
    canvas.height = picture.naturalHeight;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(picture, 0, 0);
    const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
    const [depth, height, width] = volume.shape;
    const bytes = new Uint8Array(depth * height * width);
    for (let d = 0, to = 0; d < depth; d++) {
      const top = Math.floor(d / volume.columns) * height, left = (d % volume.columns) * width;
      for (let h = 0; h < height; h++) {
        for (let w = 0; w < width; w++) bytes[to++] = pixels[4 * ((top + h) * canvas.width + left + w)];
      }
    }
    loaded.set(source, bytes);
  }
  return loaded.get(source);
}

// Black, violet, orange, yellow, so that errors stand out against grey anatomy.
const HEAT = Array.from({ length: 256 }, (_, level) => {
  const stops = [[0, 0, 0], [90, 20, 110], [222, 80, 60], [252, 220, 130]];
  const place = (level / 255) * 3, low = Math.min(2, Math.floor(place));
  return stops[low].map((from, channel) => from + (stops[low + 1][channel] - from) * (place - low));
});

function greys() {
  const low = (view.level - view.width / 2) * 255, span = Math.max(1, view.width * 255);
  return Array.from({ length: 256 }, (_, value) => Math.min(255, Math.max(0, Math.round(((value - low) / span) * 255))));
}

const sliceOf = (volume, axis) => Math.min(volume.shape[axis] - 1, Math.floor(view.at[axis] * volume.shape[axis]));
const othersOf = (axis) => [0, 1, 2].filter((other) => other !== axis);
// Radiologists look from the feet or the face: the patient's left is on the right of the picture.
const isMirrored = (volume, axis) => view.isRadiological && volume.orientation[axis] === "R";

// A plane's first axis points right, its second axis up.
function drawPlane(tile, table) {
  const { canvas, picture, axis } = tile, volume = picture.volume;
  const [across, up] = othersOf(axis);
  const strides = [volume.shape[1] * volume.shape[2], volume.shape[2], 1];
  const width = volume.shape[across], height = volume.shape[up], index = sliceOf(volume, axis);
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const image = context.createImageData(width, height), isFlipped = isMirrored(volume, across);
  for (let row = 0, to = 0; row < height; row++) {
    const start = index * strides[axis] + (height - 1 - row) * strides[up];
    for (let column = 0; column < width; column++, to += 4) {
      const value = picture.read(start + (isFlipped ? width - 1 - column : column) * strides[across]);
      const colour = picture.isHeat ? HEAT[value] : null, grey = table[value];
      image.data[to] = colour ? colour[0] : grey;
      image.data[to + 1] = colour ? colour[1] : grey;
      image.data[to + 2] = colour ? colour[2] : grey;
      image.data[to + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
  canvas.classList.toggle("exact", view.isExact);
  tile.across.style.top = `${100 * (1 - view.at[up])}%`;
  tile.down.style.left = `${100 * (isFlipped ? 1 - view.at[across] : view.at[across])}%`;
  tile.letters[0].textContent = isFlipped ? volume.orientation[across] : OPPOSITE[volume.orientation[across]];
  tile.letters[1].textContent = OPPOSITE[tile.letters[0].textContent];
  tile.across.hidden = tile.down.hidden = !view.hasHair;
}

// A figure with the plane in true proportions, the directions of its edges, and the crosshair.
function addTile(parent, picture, axis, tallest, chooses = null) {
  const volume = picture.volume, [across, up] = othersOf(axis);
  const extent = (of) => volume.grid[of] * volume.spacing_mm[of];
  const ratio = extent(across) / extent(up);
  const figure = make(parent, "figure", { class: chooses ? "chooses" : "" });
  const frame = make(figure, "div", { class: "frame" });
  frame.style.width = `min(100%, ${(tallest * ratio).toFixed(2)}px)`;
  frame.style.aspectRatio = ratio.toFixed(6);
  const canvas = make(frame, "canvas", { "data-role": picture.role, "data-axis": axis, role: "img", "aria-label": `${picture.title}, ${PLANES.find((plane) => plane.axis === axis).name} plane` });
  const vertical = volume.orientation[up];
  const letters = ["left", "right"].map((side) => make(frame, "span", { class: `letter ${side}` }));
  make(frame, "span", { class: "letter top" }, vertical);
  make(frame, "span", { class: "letter bottom" }, OPPOSITE[vertical]);
  const tile = { canvas, picture, axis, letters, across: make(frame, "i", { class: "across" }), down: make(frame, "i", { class: "down" }) };
  const caption = make(figure, "figcaption");
  make(caption, "b", {}, picture.title);
  if (picture.note) make(caption, "span", { title: picture.note }, picture.note);
  listen(tile, chooses);
  tiles.push(tile);
  return tile;
}

// A click moves the crosshair; dragging with the mouse changes width (sideways) and level (up and down).
function listen(tile, chooses) {
  const { canvas, axis } = tile, [across, up] = othersOf(axis);
  let start = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    start = { x: event.clientX, y: event.clientY, level: view.level, width: view.width, isDrag: false };
    if (event.pointerType === "mouse") canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!start || event.pointerType !== "mouse") return;
    const x = event.clientX - start.x, y = event.clientY - start.y;
    start.isDrag = start.isDrag || Math.hypot(x, y) > 4;
    if (start.isDrag) setWindow(start.level + y / 300, start.width + x / 300);
  });
  canvas.addEventListener("pointerup", (event) => {
    const isClick = start && !start.isDrag;
    start = null;
    if (!isClick) return;
    const frame = canvas.getBoundingClientRect();
    const share = (event.clientX - frame.left) / frame.width;
    view.at[across] = Math.min(0.9999, Math.max(0, isMirrored(tile.picture.volume, across) ? 1 - share : share));
    view.at[up] = Math.min(0.9999, Math.max(0, 1 - (event.clientY - frame.top) / frame.height));
    if (chooses) { view.chosen = chooses; buildCloser(); }
    redraw();
  });
  canvas.addEventListener("pointercancel", () => { start = null; });
}

function setWindow(level, width) {
  view.level = Math.min(1, Math.max(0, level));
  view.width = Math.min(1, Math.max(0.01, width));
  redraw();
}

function redraw() {
  const table = greys();
  tiles.forEach((tile) => drawPlane(tile, table));
  const first = tiles[0];
  if (!first) return;
  const length = first.picture.volume.shape[view.axis], index = sliceOf(first.picture.volume, view.axis);
  byId("slice").max = length - 1;
  byId("slice").value = index;
  byId("slice-number").textContent = `${index + 1} / ${length}`;
  byId("level").value = Math.round(100 * view.level);
  byId("width").value = Math.round(100 * view.width);
  const ends = [view.level - view.width / 2, view.level + view.width / 2].map((share) => Math.round(100 * share));
  byId("window-text").textContent = `${ends[0]} to ${ends[1]} %`;
  document.querySelectorAll(".plane[data-axis]").forEach((block) => {
    const axis = Number(block.dataset.axis), volume = block.volume;
    block.querySelector("input").value = sliceOf(volume, axis);
    block.querySelector("output").textContent = `${sliceOf(volume, axis) + 1} / ${volume.shape[axis]}`;
  });
}

const TITLES = { sample: "sample", nearest: "nearest training", real: "real", input: "input", reconstruction: "reconstruction",
  labelmap: "label map", volume: "condition", target: "target" };

async function pictureOf(set, kind, place) {
  const volume = set.volumes[`${kind}_${place}`];
  if (!volume) return null;
  const bytes = await bytesOf(volume);
  const title = kind === "sample" ? volume.name || `sample ${place + 1}` : TITLES[kind] || kind;
  const note = kind === "sample" ? volume.note : [volume.name, volume.note].filter(Boolean).join(", ");
  return { role: kind, title, note, volume, read: (at) => bytes[at], isHeat: false };
}

function errorOf(input, result) {
  if (!input || !result) return null;
  const read = (at) => Math.min(255, Math.round(view.gain * Math.abs(input.read(at) - result.read(at))));
  return { role: "error", title: `error × ${view.gain}`, note: "", volume: input.volume, read, isHeat: true };
}

const placesOf = (set, kind) => Object.keys(set.volumes).filter((role) => role.startsWith(`${kind}_`)).map((role) => Number(role.split("_")[1])).sort((a, b) => a - b);

// The pictures of one column: a sample with its neighbours, or a held-out volume with its reconstruction.
async function columnOf(set, place) {
  if (set.stage === "autoencoder") {
    const input = await pictureOf(set, "input", place), result = await pictureOf(set, "reconstruction", place);
    return [input, result, errorOf(input, result)].filter(Boolean);
  }
  const real = placesOf(set, "real"), partner = real.length ? real[place % real.length] : 0;
  const pictures = [];
  const kinds = new Set(Object.keys(set.volumes).map((name) => name.replace(/_\d+$/, "")));
  const conditions = [...kinds].filter((kind) => !["sample", "target", "nearest", "real"].includes(kind));
  for (const kind of [...conditions, "sample", "target", "nearest"]) pictures.push(await pictureOf(set, kind, place));
  return [...pictures, await pictureOf(set, "real", partner)].filter(Boolean);
}

async function sampleGroups(sets) {
  const groups = [];
  for (const set of sets) {
    const columns = [];
    for (const place of placesOf(set, "sample")) columns.push({ choice: { set, place }, pictures: (await columnOf(set, place)).filter((one) => one.role !== "real") });
    groups.push({ title: set.label ? `${set.label}step ${set.step.toLocaleString("en")}` : "Samples", columns });
  }
  const withReal = sets.find((set) => placesOf(set, "real").length);
  if (withReal) {
    const columns = [];
    for (const place of placesOf(withReal, "real")) columns.push({ choice: null, pictures: [await pictureOf(withReal, "real", place)] });
    groups.push({ title: `Real, held out${sets.length > 1 ? ` (${withReal.label.replace(/, $/, "")})` : ""}`, columns });
  }
  return groups;
}

function drawGallery(place, groups) {
  place.textContent = "";
  for (const group of groups) {
    const block = make(place, "div", { class: "group" });
    if (group.title) make(block, "h3", {}, group.title);
    const grid = make(block, "div", { class: "columns" });
    // The first group sets the number of columns for all, so that samples and real volumes have one size.
    grid.style.setProperty("--columns", groups[0].columns.length);
    for (const column of group.columns) {
      const strip = make(grid, "div", { class: "column" });
      for (const picture of column.pictures) addTile(strip, picture, view.axis, TALLEST.gallery, column.choice);
    }
  }
}

async function buildViewer() {
  const ticket = ++view.ticket;
  const groups = await sampleGroups(chosenSets("ldm", "sample-set"));
  const pairs = [];
  for (const set of chosenSets("autoencoder", "reconstruction-set").slice(0, 1)) {
    const columns = [];
    for (const place of placesOf(set, "input")) columns.push({ choice: { set, place }, pictures: await columnOf(set, place) });
    pairs.push({ title: set.label.replace(/, $/, ""), columns });
  }
  if (ticket !== view.ticket) return; // another choice was made while the images loaded
  tiles = [];
  byId("samples").hidden = groups.length === 0;
  byId("reconstructions").hidden = pairs.length === 0;
  byId("viewer-bar").hidden = groups.length + pairs.length === 0;
  showJumps();
  drawGallery(byId("sample-gallery"), groups);
  drawGallery(byId("reconstruction-gallery"), pairs);
  const choices = [...groups, ...pairs].flatMap((group) => group.columns.map((column) => column.choice)).filter(Boolean);
  const same = view.chosen && choices.find(({ set, place }) => set.stage === view.chosen.set.stage && place === view.chosen.place);
  view.chosen = same || choices[0] || null;
  await buildCloser();
  redraw();
}

async function buildCloser() {
  byId("closer").hidden = !view.chosen;
  if (!view.chosen) return;
  const { set, place } = view.chosen, ticket = view.ticket;
  const pictures = await columnOf(set, place);
  if (ticket !== view.ticket || view.chosen.place !== place || view.chosen.set !== set) return;
  const area = byId("planes");
  tiles = tiles.filter((tile) => !area.contains(tile.canvas));
  area.textContent = "";
  const volume = pictures[0].volume;
  byId("closer-name").textContent = `${set.label}${pictures[0].title}${pictures[0].note ? `, ${pictures[0].note}` : ""}, step ${set.step.toLocaleString("en")}; click a volume above to see another`;
  for (const plane of PLANES) {
    const block = make(area, "div", { class: "plane", "data-axis": plane.axis });
    block.volume = volume;
    const slide = make(block, "label", { class: "slide" });
    make(slide, "span", {}, plane.name);
    const slider = make(slide, "input", { type: "range", min: 0, max: volume.shape[plane.axis] - 1, step: 1, "aria-label": `${plane.name} slice` });
    make(slide, "output");
    const strip = make(block, "div", { class: "strip" });
    for (const picture of pictures) addTile(strip, picture, plane.axis, TALLEST.closer);
    slider.addEventListener("input", () => { view.at[plane.axis] = (Number(slider.value) + 0.5) / volume.shape[plane.axis]; redraw(); });
  }
  const isSmaller = volume.grid.some((length, axis) => length !== volume.shape[axis]);
  const spacing = volume.spacing_mm.map((mm) => short(mm)).join(" × ");
  const note = make(area, "div", { class: "note quiet" });
  make(note, "p", {}, `Grid ${volume.grid.join(" × ")}${isSmaller ? `, shown as ${volume.shape.join(" × ")}` : ""}, ${spacing} mm. A click moves the crosshair in all planes; dragging sideways changes the width of the window, up and down its level.`);
  if (pictures.some((picture) => picture.isHeat)) make(note, "p", {}, "Error: absolute difference relative to the intensity range, times the chosen factor. Black means no error.");
  redraw();
}

// Of several runs the newest samples are shown side by side, unless one set is chosen.
function chosenSets(stage, id) {
  const choice = byId(id).value;
  const sets = data.sets.filter((set) => set.stage === stage);
  if (choice !== "" && choice !== "newest") return sets.filter((set) => `${set.label}${set.step}` === choice);
  return sets.filter((set, number) => sets.findIndex((other) => other.label === set.label) === number);
}

function fillChoices() {
  for (const [stage, id] of [["ldm", "sample-set"], ["autoencoder", "reconstruction-set"]]) {
    const choice = byId(id), before = choice.value;
    choice.textContent = "";
    make(choice, "option", { value: "newest" }, "newest");
    for (const set of data.sets.filter((one) => one.stage === stage)) make(choice, "option", { value: `${set.label}${set.step}` }, `${set.label}step ${set.step.toLocaleString("en")}`);
    choice.value = Array.from(choice.options).some((option) => option.value === before) ? before : "newest";
  }
}

function showJumps() {
  document.querySelectorAll("#jump a").forEach((link) => { link.hidden = byId(link.hash.slice(1)).hidden; });
}

function onChange(id, kind, act) { byId(id).addEventListener(kind, (event) => act(event.target)); }
onChange("plane", "change", (target) => { view.axis = Number(target.value); buildViewer(); });
onChange("slice", "input", (target) => { view.at[view.axis] = (Number(target.value) + 0.5) / (Number(target.max) + 1); redraw(); });
onChange("level", "input", (target) => setWindow(Number(target.value) / 100, view.width));
onChange("width", "input", (target) => setWindow(view.level, Number(target.value) / 100));
onChange("reset", "click", () => { view.at = [0.5, 0.5, 0.5]; setWindow(0.5, 1); });
onChange("exact", "change", (target) => { view.isExact = target.checked; redraw(); });
onChange("hair", "change", (target) => { view.hasHair = target.checked; redraw(); });
onChange("radiological", "change", (target) => { view.isRadiological = target.checked; redraw(); });
onChange("gain", "change", (target) => { view.gain = Number(target.value); buildViewer(); });
onChange("sample-set", "change", () => buildViewer());
onChange("reconstruction-set", "change", () => buildViewer());
fillChoices();
buildViewer();
