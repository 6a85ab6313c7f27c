// Each volume is one image of tiles. Its pixels are read once; every plane is then cut from them.
const PLANES = [
  { axis: 2, name: "axial" },
  { axis: 1, name: "coronal" },
  { axis: 0, name: "sagittal" },
];
const loaded = new Map();
const view = { set: 0, gain: 4, at: [0.5, 0.5, 0.5], ticket: 0 };

async function bytesOf(volume) {
  if (!loaded.has(volume.picture)) {
    const picture = new Image();
    picture.src = data.pictures[volume.picture];
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
    loaded.set(volume.picture, bytes);
  }
  return loaded.get(volume.picture);
}

// Black, violet, orange, yellow, so that errors stand out against grey anatomy.
const HEAT = Array.from({ length: 256 }, (_, level) => {
  const stops = [[0, 0, 0], [90, 20, 110], [222, 80, 60], [252, 220, 130]];
  const place = (level / 255) * 3, low = Math.min(2, Math.floor(place));
  return stops[low].map((from, channel) => from + (stops[low + 1][channel] - from) * (place - low));
});

// A plane's first axis points right, its second axis up.
function drawPlane(canvas, volume, axis, index, read, isHeat) {
  const [across, up] = [0, 1, 2].filter((other) => other !== axis);
  const strides = [volume.shape[1] * volume.shape[2], volume.shape[2], 1];
  const width = volume.shape[across], height = volume.shape[up];
  canvas.width = width;
  canvas.height = height;
  canvas.style.aspectRatio = `${volume.grid[across]} / ${volume.grid[up]}`;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const picture = context.createImageData(width, height);
  for (let row = 0, to = 0; row < height; row++) {
    const start = index * strides[axis] + (height - 1 - row) * strides[up];
    for (let column = 0; column < width; column++, to += 4) {
      const value = read(start + column * strides[across]);
      const colour = isHeat ? HEAT[value] : null;
      picture.data[to] = colour ? colour[0] : value;
      picture.data[to + 1] = colour ? colour[1] : value;
      picture.data[to + 2] = colour ? colour[2] : value;
      picture.data[to + 3] = 255;
    }
  }
  context.putImageData(picture, 0, 0);
}

async function columnsOf(set) {
  const columns = [];
  for (const role of Object.keys(set.volumes).sort()) {
    const volume = set.volumes[role], bytes = await bytesOf(volume);
    columns.push({ name: role.replace("_", " "), volume, read: (place) => bytes[place], isHeat: false });
  }
  if (set.volumes.input && set.volumes.reconstruction) {
    const input = await bytesOf(set.volumes.input), result = await bytesOf(set.volumes.reconstruction);
    const error = (place) => Math.min(255, Math.round(view.gain * Math.abs(input[place] - result[place])));
    columns.push({ name: "error", volume: set.volumes.input, read: error, isHeat: true });
  }
  return columns;
}

async function buildViewer() {
  const set = data.sets[view.set];
  const ticket = ++view.ticket;
  const columns = await columnsOf(set);
  if (ticket !== view.ticket) return; // the user chose another set while the images loaded
  const area = document.getElementById("planes");
  area.textContent = "";
  document.getElementById("gain-label").hidden = !columns.some((column) => column.isHeat);
  const volume = columns[0].volume;
  const redraws = [];
  for (const plane of PLANES) {
    const block = make(area, "div", { class: "plane", "data-axis": plane.axis });
    const slide = make(block, "label", { class: "slide" });
    make(slide, "span", {}, plane.name);
    const slider = make(slide, "input", { type: "range", min: 0, max: volume.shape[plane.axis] - 1, step: 1, "aria-label": `${plane.name} slice` });
    const reading = make(slide, "output");
    const strip = make(block, "div", { class: "strip" });
    const canvases = columns.map((column) => {
      const figure = make(strip, "figure");
      const canvas = make(figure, "canvas", { "data-role": column.name });
      make(figure, "figcaption", {}, column.isHeat ? `error × ${view.gain}` : column.name);
      return canvas;
    });
    const redraw = () => {
      const index = Math.min(volume.shape[plane.axis] - 1, Math.floor(view.at[plane.axis] * volume.shape[plane.axis]));
      slider.value = index;
      reading.textContent = `${index + 1} / ${volume.shape[plane.axis]}`;
      columns.forEach((column, number) => drawPlane(canvases[number], column.volume, plane.axis, index, column.read, column.isHeat));
    };
    slider.addEventListener("input", () => { view.at[plane.axis] = (Number(slider.value) + 0.5) / volume.shape[plane.axis]; redraw(); });
    // A click moves the other two planes to that point.
    const [across, up] = [0, 1, 2].filter((other) => other !== plane.axis);
    canvases.forEach((canvas) => canvas.addEventListener("click", (event) => {
      const frame = canvas.getBoundingClientRect();
      view.at[across] = Math.min(0.999, Math.max(0, (event.clientX - frame.left) / frame.width));
      view.at[up] = Math.min(0.999, Math.max(0, 1 - (event.clientY - frame.top) / frame.height));
      redraws.forEach((again) => again());
    }));
    redraws.push(redraw);
    redraw();
  }
  const isSmaller = volume.grid.some((length, axis) => length !== volume.shape[axis]);
  const size = volume.grid.join(" × ");
  const note = make(area, "div", { class: "note quiet" });
  make(note, "p", {}, `Grid ${size}${isSmaller ? `, shown as ${volume.shape.join(" × ")}` : ""}. Click a slice to move the other two planes there.`);
  if (columns.some((column) => column.isHeat)) make(note, "p", {}, "Error: absolute difference relative to the intensity range, times the factor above. Black means no error.");
}

if (data.sets.length) {
  document.getElementById("volumes").hidden = false;
  const choice = document.getElementById("set");
  data.sets.forEach((set, number) => {
    const what = set.volumes.input ? "reconstruction" : "samples";
    make(choice, "option", { value: number }, `${set.label}${what}, step ${set.step.toLocaleString("en")}`);
  });
  const isReconstruction = data.sets.findIndex((set) => set.volumes.input);
  view.set = Math.max(0, isReconstruction);
  choice.value = view.set;
  choice.addEventListener("change", () => { view.set = Number(choice.value); buildViewer(); });
  const gain = document.getElementById("gain");
  gain.addEventListener("change", () => { view.gain = Number(gain.value); buildViewer(); });
  buildViewer();
}
