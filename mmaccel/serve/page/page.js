// The page of `mmaccel serve`: one stream for each recipe, which are given the same frames and asked the same questions.

const $ = (id) => document.getElementById(id);
const SESSIONS = "/v1/streaming/sessions";
const LARGEST = 180e6; // bytes of a file that fit into a request as base64
let runs = [];
let camera = null;
let asked = 0;

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function call(path, body, method = body === undefined ? "GET" : "POST") {
  const answer = await fetch(path, { method, headers: headers(), body: body && JSON.stringify(body) });
  const told = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(told.error?.message ?? `the server answers with status ${answer.status}.`);
  return told;
}

function tell(error) {
  $("error").textContent = error ? error.message ?? String(error) : "";
  $("error").hidden = !error;
}

const state = (text) => { $("state").textContent = text; };
const clock = (s) => `${Math.floor(s / 60)}:${String(Math.floor(s % 60)).padStart(2, "0")}`;

class Run {
  constructor(recipe) {
    this.recipe = recipe;
    this.box = $("run").content.firstElementChild.cloneNode(true);
    this.box.querySelector("h2").textContent = recipe;
    $("runs").append(this.box);
  }

  part(name) { return this.box.querySelector(`.${name}`); }

  async open() {
    const made = await call(SESSIONS, { recipe: this.recipe });
    this.path = `${SESSIONS}/${made.id}`;
    this.socket = new WebSocket(`${location.origin.replace(/^http/, "ws")}${this.path}/socket`);
    this.socket.onmessage = (event) => this.hear(JSON.parse(event.data));
    await new Promise((done, failed) => {
      this.socket.onopen = () => {
        if ($("key").value) this.send({ type: "key", key: $("key").value });
        done();
      };
      this.socket.onerror = () => failed(new Error("the server closed the connection; is the key right?"));
    });
    this.looking = setInterval(() => this.look(), 1000);
  }

  send(message) { if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message)); }
  look() { this.send({ type: "look" }); }

  hear(message) {
    if (message.type === "delta") this.part("answer").textContent += message.text;
    else if (message.type === "evidence") this.show(message.evidence);
    else if (message.type === "answer") this.end(message);
    else if (message.name === "stream") this.draw(message);
    else if (message.name === "error") tell(message);
    else if (message.name === "dropped") state(`${message.frames} frames came too fast and were left out.`);
  }

  ask(question) {
    this.part("asked").textContent = question;
    for (const name of ["answer", "took", "evidence"]) this.part(name).replaceChildren();
    this.send({ type: "ask", id: String(asked), question, max_tokens: Number($("most").value), thumbnails: true });
  }

  show(evidence) {
    if (evidence?.length && evidence.every((one) => one.score === null && one.share === 1)) {
      this.part("evidence").textContent = "Every frame was in view.";
      return;
    }
    this.part("evidence").replaceChildren(...(evidence ?? []).map((one) => {
      const item = document.createElement("li");
      const image = document.createElement("img");
      image.src = one.image ?? "data:,";
      const share = one.score === null ? "" : `, ${Math.round(100 * one.score)}%`;
      image.alt = `the frame at ${clock(one.seconds)}`;
      item.append(image, `${clock(one.seconds)}${share}`);
      return item;
    }));
  }

  end(answer) {
    this.part("answer").textContent = answer.text;
    const pace = answer.tokens_per_s ? `, then ${answer.tokens_per_s.toFixed(1)} tokens a second` : "";
    this.part("took").textContent =
      `${answer.tokens} tokens (${answer.finish_reason}), the first after ${answer.ttft_s.toFixed(2)} s${pace}`;
  }

  // A row for each level of clusters, a stripe for each step of time, a colour for each cluster.
  draw(facts) {
    const canvas = this.part("timeline");
    canvas.width = canvas.clientWidth * devicePixelRatio;
    canvas.height = canvas.clientHeight * devicePixelRatio;
    const pen = canvas.getContext("2d");
    const levels = Object.values(facts.clusters);
    const rows = levels.length ? levels : [facts.shown.map(() => 0)];
    rows.forEach((row, level) => row.forEach((cluster, n) => {
      pen.fillStyle = levels.length ? `hsl(${(cluster * 137.5) % 360} 60% ${level ? 68 : 52}%)` : "#8aa0bd";
      const [from, to] = [n, n + 1].map((one) => Math.floor(one * canvas.width / row.length));
      const height = canvas.height / rows.length;
      pen.fillRect(from, level * height, Math.max(1, to - from - 1), height - 2);
    }));
    const found = Object.entries(facts.clusters).map(([name, row]) => `${new Set(row).size} ${name} clusters`);
    const bytes = facts.counters.bytes ? [`${(facts.counters.bytes / 2 ** 20).toFixed(1)} MiB`] : [];
    this.part("held").textContent = [`${facts.frames} frames, ${clock(facts.seconds)}`, ...found, ...bytes].join(" · ");
  }

  async close() {
    clearInterval(this.looking);
    this.socket?.close();
    if (this.path) await call(this.path, undefined, "DELETE").catch(() => {});
    this.box.remove();
  }
}

async function begin() {
  tell(null);
  stop();
  await Promise.all(runs.map((run) => run.close()));
  const names = [...new Set([$("first").value, $("second").value].filter(Boolean))];
  runs = names.map((name) => new Run(name));
  await Promise.all(runs.map((run) => run.open()));
}

function stop() {
  if (!camera) return;
  clearInterval(camera.timer);
  camera.stream.getTracks().forEach((track) => track.stop());
  camera = null;
  $("stop").disabled = true;
  state("The camera is off.");
}

async function give(url, name) {
  await begin();
  state(`Reading ${name} …`);
  const body = { video_url: { url }, fps: Number($("fps").value), stored: true };
  const taken = await Promise.all(runs.map((run) => call(`${run.path}/frames`, body)));
  runs.forEach((run) => run.look());
  state(`${name}: ${taken[0].taken} frames, ${clock(taken[0].seconds)}.`);
  $("send").disabled = false;
}

function show(source) {
  const video = $("video");
  video.srcObject = source instanceof MediaStream ? source : null;
  if (!(source instanceof MediaStream)) video.src = source;
  video.hidden = false;
  $("hint").hidden = true;
}

async function file(chosen) {
  if (chosen.size > LARGEST) throw new Error(`${chosen.name} has more than ${LARGEST / 1e6} MB; give its address instead.`);
  show(URL.createObjectURL(chosen));
  const data = await new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${chosen.name} cannot be read.`));
    reader.readAsDataURL(chosen);
  });
  await give(`data:video/mp4;base64,${data.slice(data.indexOf(",") + 1)}`, chosen.name);
}

async function watch() {
  const stream = await navigator.mediaDevices.getUserMedia({ video: { width: 640 } });
  await begin();
  show(stream);
  await $("video").play();
  const canvas = document.createElement("canvas");
  const began = performance.now();
  let sent = 0;
  const frame = () => {
    canvas.width = $("video").videoWidth;
    canvas.height = $("video").videoHeight;
    canvas.getContext("2d").drawImage($("video"), 0, 0);
    const data = canvas.toDataURL("image/jpeg", 0.85);
    const time = (performance.now() - began) / 1000;
    runs.forEach((run) => run.send({ type: "frame", data, time }));
    state(`The camera: ${++sent} frames sent, ${clock(time)}.`);
    $("send").disabled = false;
  };
  camera = { stream, timer: setInterval(frame, 1000 / Number($("fps").value)) };
  $("stop").disabled = false;
}

function guarded(work) {
  return async (event) => {
    event?.preventDefault();
    try { await work(event); } catch (error) { tell(error); state(""); }
  };
}

async function connect() {
  const answer = await fetch("/v1/models", { headers: headers() });
  $("keyed").hidden = answer.status !== 401 && !$("key").value;
  if (answer.status === 401) { $("model").textContent = "this server needs a key"; return; }
  const listed = await answer.json();
  $("model").textContent = listed.data[0].id;
  const { streams } = listed.mmaccel;
  if (!streams.length) throw new Error("this server has no recipe for streams; start it with --recipe mosaic.");
  const options = () => streams.map((name) => new Option(name, name));
  $("first").replaceChildren(...options());
  $("first").value = streams.includes("mosaic") ? "mosaic" : streams[0];
  $("second").replaceChildren(new Option("none", ""), ...options());
}

$("file").onchange = guarded(() => $("file").files[0] && file($("file").files[0]));
$("camera").onclick = guarded(watch);
$("stop").onclick = stop;
$("read").onclick = guarded(async () => {
  const url = $("url").value.trim();
  if (!url) throw new Error("Give the address of a video.");
  await give(url, url);
});
$("ask").onsubmit = guarded(() => {
  tell(null);
  const question = $("question").value;
  asked += 1;
  runs.forEach((run) => run.ask(question));
});
$("key").onchange = guarded(connect);
const drop = $("drop");
drop.ondragover = (event) => { event.preventDefault(); drop.classList.add("over"); };
drop.ondragleave = () => drop.classList.remove("over");
drop.ondrop = guarded((event) => {
  drop.classList.remove("over");
  if (!event.dataTransfer.files.length) throw new Error("Drop a video file.");
  return file(event.dataTransfer.files[0]);
});
guarded(connect)();
