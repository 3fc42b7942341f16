// The page's whole behaviour: attach files, ask, show the answer as it streams, take results of its tool calls, show
// where the request is, and the pods.
// Text from people and models only ever becomes text nodes; the server's policy refuses anything else.

const KINDS = {
  image: { part: "image_url", name: "an image", question: "What is in this image?" },
  video: { part: "video_url", name: "a video", question: "What happens in the video?" },
  audio: { part: "audio_url", name: "audio", question: "What do you hear?" },
};
const MAX_FILES = 16;
const SHOWN_PHASES = 60;
const POLL_PODS_MS = 1000;
const POLL_REQUEST_MS = 250;
const POLL_TIMEOUT_MS = 5000;
const SPOKEN_CHARACTERS = 120; // a screen reader gets sentences, or pieces of about this length

const ADMIN = "admin" in document.body.dataset; // on the admin port pods and recent requests can be asked for

const NEEDS_KEY = "key" in document.body.dataset; // kept in its field alone: nothing of this page outlives the tab
const OPEN_TO_ALL = "No API key is needed: anyone who can reach this gateway can use it.";

const byId = (id) => document.getElementById(id);
const attached = []; // { file, kind, url, item }
let model = null; // entry of /v1/models
let limits = null; // of /debug/state
let key = "";
let refusedKey = ""; // asking again with it would not help
let running = null; // AbortController of the request under way

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const milliseconds = (value) => (value >= 10_000 ? `${(value / 1000).toFixed(1)} s` : `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function submitOnEnter(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
}

function say(text) {
  byId("progress").textContent = text;
}

function showError(text) {
  byId("error").textContent = text;
  byId("error").hidden = !text;
}

const credentials = () => (key ? { authorization: `Bearer ${key}` } : {});

async function getJson(path) {
  const response = await fetch(path, { headers: credentials(), signal: AbortSignal.timeout(POLL_TIMEOUT_MS) });
  if (!response.ok) throw Object.assign(new Error(`${path} returned status ${response.status}`), { status: response.status });
  return response.json();
}

// --- files ---------------------------------------------------------------------------------------------------------

const readableSize = (bytes) => (bytes < 1 << 20 ? `${Math.max(1, Math.round(bytes / 1024))} KiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`);

function attach(file) {
  const kind = file.type.split("/")[0];
  if (!(kind in KINDS)) return showError(`${file.name} is not an image, video or audio file; choose another file.`);
  if (model && !model.modalities.includes(kind)) {
    return showError(`${model.id} does not accept ${KINDS[kind].name}; it accepts ${model.modalities.join(", ")}.`);
  }
  if (attached.length >= MAX_FILES) return showError(`A question can have at most ${MAX_FILES} files; remove one first.`);
  showError("");
  const entry = { file, kind, url: URL.createObjectURL(file) };
  entry.item = make(
    "li",
    {},
    preview(entry),
    make("span", { className: "name" }, file.name, make("small", {}, `${kind}, ${readableSize(file.size)}`)),
    make("button", { type: "button", className: "quiet", "aria-label": `Remove ${file.name}`, onclick: () => detach(entry) }, "Remove"),
  );
  attached.push(entry);
  byId("attached").append(entry.item);
  const question = byId("question");
  const stock = Object.values(KINDS).map((one) => one.question);
  if (!question.value.trim() || stock.includes(question.value)) question.value = KINDS[kind].question;
  say(`${file.name} is attached.`);
  return undefined;
}

function preview({ file, kind, url }) {
  const label = `Preview of ${file.name}`;
  const shown = kind === "image"
    ? make("img", { className: "preview", alt: label, src: url })
    : make(kind, { className: "preview", controls: true, muted: kind === "video", preload: "metadata", "aria-label": label, src: url });
  shown.addEventListener("error", () => shown.replaceWith(make("span", { className: "preview hint" }, "no preview")));
  return shown;
}

function detach(entry) {
  const place = attached.indexOf(entry);
  attached.splice(place, 1);
  entry.item.remove();
  URL.revokeObjectURL(entry.url);
  const next = attached[Math.min(place, attached.length - 1)];
  (next ? next.item.querySelector("button") : byId("files")).focus();
  say(`${entry.file.name} was removed.`);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read; choose it again.`));
    reader.readAsDataURL(file);
  });
}

// --- samples -------------------------------------------------------------------------------------------------------

const anyOf = (list) => list[Math.floor(Math.random() * list.length)];

function drawCircle() {
  const size = 128;
  const canvas = make("canvas", { width: size, height: size });
  const pen = canvas.getContext("2d");
  const ground = pen.createLinearGradient(0, 0, 0, size);
  ground.addColorStop(0, "#0c0d10");
  ground.addColorStop(1, "#2c2f33");
  pen.fillStyle = ground;
  pen.fillRect(0, 0, size, size);
  const [color, paint] = anyOf([["red", "#e02828"], ["yellow", "#ebd92f"], ["green", "#2abd3e"], ["blue", "#3453eb"], ["purple", "#9b39cc"]]);
  const [across, down] = anyOf([[0.26, 0.26], [0.74, 0.26], [0.5, 0.5], [0.5, 0.74]]);
  pen.fillStyle = paint;
  pen.beginPath();
  pen.arc(across * size, down * size, 0.155 * size, 0, 2 * Math.PI);
  pen.fill();
  canvas.toBlob((blob) => attach(new File([blob], `${color}-circle.png`, { type: "image/png" })), "image/png");
}

function makeTone() {
  const rate = 16_000;
  const seconds = 1.1;
  const [pitch, middle] = anyOf([["low", 220], ["medium", 800], ["high", 3000]]);
  const [trend, glide] = anyOf([["steady", 1], ["rising", 2.2], ["falling", 1 / 2.2]]);
  const samples = new Int16Array(rate * seconds);
  let phase = 0;
  for (let number = 0; number < samples.length; number += 1) {
    const time = number / rate;
    phase += (2 * Math.PI * middle * glide ** (time / seconds - 0.5)) / rate;
    samples[number] = 9000 * Math.min(1, time / 0.02, (seconds - time) / 0.02) * Math.sin(phase);
  }
  attach(new File([wavHeader(samples.byteLength, rate), samples], `${pitch}-${trend}-tone.wav`, { type: "audio/wav" }));
}

// RIFF header of 16-bit mono PCM.
function wavHeader(bytes, rate) {
  const view = new DataView(new ArrayBuffer(44));
  const word = (offset, text) => [...text].forEach((letter, index) => view.setUint8(offset + index, letter.charCodeAt(0)));
  word(0, "RIFF");
  view.setUint32(4, 36 + bytes, true);
  word(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, rate * 2, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  word(36, "data");
  view.setUint32(40, bytes, true);
  return view.buffer;
}

// --- asking --------------------------------------------------------------------------------------------------------

async function question() {
  const parts = await Promise.all(
    attached.map(async ({ file, kind }) => ({ type: KINDS[kind].part, [KINDS[kind].part]: { url: await dataUrl(file) } })),
  );
  return { role: "user", content: [...parts, { type: "text", text: byId("question").value }] };
}

function requestBody(messages, tools) {
  const body = {
    model: model.id,
    messages,
    max_tokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true },
    timings: true,
  };
  if (byId("seed").value !== "") body.seed = byId("seed").valueAsNumber;
  const json = JSON.stringify(body);
  return tools ? `${json.slice(0, -1)},"tools":${tools}}` : json; // as they were written: numbers here have 53 bits only
}

// The JSON array in the field of tools, or nothing; null where it has something else, which is then reported at the field.
function readTools() {
  const field = byId("tools");
  const tools = field.value.trim();
  let fault = "";
  try {
    if (tools && !Array.isArray(JSON.parse(tools))) fault = "Tools must be a JSON array; enclose them in [ and ].";
  } catch (error) {
    fault = `Tools are not valid JSON (${error.message}); correct them, or clear the field to ask without tools.`;
  }
  showToolsFault(fault);
  if (!fault) return tools;
  field.closest("details").open = true;
  field.focus();
  return null;
}

function showToolsFault(text) {
  byId("tools-error").textContent = text;
  byId("tools-error").hidden = !text;
  byId("tools").setAttribute("aria-invalid", String(Boolean(text)));
}

// Server-sent events as parsed JSON, until [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection closed before the answer was complete; send the question again.");
    const blocks = (pending + value).split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment that keeps the connection open
      const data = block.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// The answer on screen token by token; what a screen reader is told grows by whole sentences.
class AnswerText {
  constructor() {
    this.whole = "";
    this.tail = make("span", { "aria-hidden": "true" });
    const live = { role: "log", "aria-live": "polite", "aria-atomic": "false", "aria-labelledby": "answer-heading", "aria-busy": "true" };
    this.log = make("div", { className: "answer", ...live }, this.tail);
  }

  add(text) {
    this.whole += text;
    this.tail.append(text);
    const pending = this.tail.textContent;
    if (/[.!?…]\s|\n/.test(pending) || (pending.length > SPOKEN_CHARACTERS && /\s$/.test(pending))) this.settle();
  }

  settle() {
    if (this.tail.textContent) this.tail.before(make("span", {}, this.tail.textContent));
    this.tail.replaceChildren();
  }

  end() {
    this.settle();
    this.log.setAttribute("aria-busy", "false");
  }
}

// A call as it streams: the first delta has its id and name, the others more of its arguments.
class ToolCall {
  constructor(number, { id, function: { name } }) {
    this.title = `call ${number}, ${name}`;
    this.id = id;
    this.name = name;
    this.arguments = make("pre", { className: "arguments" });
    this.result = make("textarea", { rows: 2, required: true, spellcheck: false, autocomplete: "off", onkeydown: submitOnEnter });
    this.item = make("li", {}, `Call ${number} `, make("code", {}, name), this.arguments);
  }

  askForResult() {
    this.item.append(make("label", {}, `Result of ${this.title}`, this.result));
  }

  asked() {
    return { id: this.id, type: "function", function: { name: this.name, arguments: this.arguments.textContent } };
  }

  answered() {
    return { role: "tool", tool_call_id: this.id, content: this.result.value };
  }
}

// An answer on screen, below the turn that it continues: its reasoning, its text and its tool calls. Results can be sent, and sent again,
// from every turn: those after it give way to the new answer.
class Turn {
  constructor(before) {
    this.messages = []; // what it answers
    this.reasoning = null;
    this.text = new AnswerText();
    this.calls = new Map(); // by index
    this.list = make("ol", { className: "calls", "aria-label": "Tool calls" });
    this.form = make("form", { onsubmit: (event) => this.sendResults(event) }, this.list);
    this.item = make("div", { className: "turn" }, this.text.log);
    while (byId("answer").lastChild !== (before?.item ?? null)) byId("answer").lastChild.remove();
    byId("answer").append(this.item);
  }

  // Show what a chunk adds; what the model is doing, or nothing.
  add({ reasoning_content: reasoning, content, tool_calls: calls }) {
    if (reasoning) this.addReasoning(reasoning);
    if (content) this.text.add(content);
    for (const call of calls ?? []) this.addCall(call);
    if (calls?.length) return "Calling tools…";
    return content ? "Answering…" : reasoning ? "Reasoning…" : "";
  }

  addReasoning(text) {
    if (!this.reasoning) {
      this.reasoning = make("div", { className: "reasoning" });
      this.item.prepend(make("details", {}, make("summary", {}, "Reasoning"), this.reasoning));
    }
    this.reasoning.append(text);
  }

  addCall(delta) {
    if (!this.calls.has(delta.index)) {
      const call = new ToolCall(document.querySelectorAll(".calls li").length + 1, delta);
      this.calls.set(delta.index, call);
      this.list.append(call.item);
      this.item.append(this.form);
    }
    this.calls.get(delta.index).arguments.append(delta.function.arguments);
  }

  askForResults() {
    for (const call of this.calls.values()) call.askForResult();
    this.button = make("button", { type: "submit", "data-sends": "" }, "Send results");
    this.form.append(make("p", { className: "actions" }, this.button));
  }

  sendResults(event) {
    event.preventDefault();
    return send(() => {
      this.button.textContent = "Send results again";
      const calls = [...this.calls.values()];
      const message = { role: "assistant", content: this.text.whole || null, tool_calls: calls.map((call) => call.asked()) };
      if (this.reasoning) message.reasoning_content = this.reasoning.textContent;
      return [...this.messages, message, ...calls.map((call) => call.answered())];
    }, this);
  }
}

function ask(event) {
  event.preventDefault();
  return send(async () => [await question()]);
}

// Send messages, and show the answer below the turn that they continue; without one they begin anew.
async function send(compose, before = null) {
  if (running) return undefined;
  if (!model) {
    return showError(NEEDS_KEY ? "Enter a valid API key first." : "The gateway did not report its model; check that it is reachable.");
  }
  if (![...document.querySelectorAll(".settings input")].every((field) => field.reportValidity())) return undefined;
  const tools = readTools();
  if (tools === null) return undefined;
  const control = new AbortController();
  running = control;
  setRunning(true);
  showError("");
  say("Reading files…");
  const id = `page-${[...crypto.getRandomValues(new Uint32Array(4))].map((word) => word.toString(16)).join("")}`;
  const request = { id, firstToken: false, over: false };
  const turn = new Turn(before);
  clearJourney();
  let following = null;
  try {
    turn.messages = await compose();
    const body = requestBody(turn.messages, tools);
    if (limits && body.length > limits.max_body_bytes) {
      throw new Error(`The request is ${readableSize(body.length)}, more than the limit of ${readableSize(limits.max_body_bytes)}; remove a file or shorten its text.`);
    }
    say("Sent. Waiting for the first token…");
    if (ADMIN) following = follow(request);
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", "x-client-request-id": id, ...credentials() },
      body,
      signal: control.signal,
    });
    if (!response.ok) throw await refusal(response);
    byId("request-id").textContent = `Request ${response.headers.get("x-request-id")}`;
    let usage = null;
    let finish = "";
    let doing = "";
    for await (const piece of events(response)) {
      if (piece.error) throw new Error(piece.error.message);
      usage = piece.usage ?? usage;
      if (piece.timings) showFigures(piece.timings, usage);
      for (const choice of piece.choices) {
        finish = choice.finish_reason ?? finish;
        const now = turn.add(choice.delta);
        if (!now) continue;
        if (now !== doing) say(now);
        doing = now;
        request.firstToken = true;
      }
    }
    if (finish === "tool_calls") turn.askForResults();
    say(ending(finish, turn.calls.size));
  } catch (error) {
    if (control.signal.aborted) say("Stopped.");
    else {
      say("");
      showError(error instanceof TypeError ? "The gateway cannot be reached or closed the connection; try again." : error.message);
    }
  } finally {
    turn.text.end();
    request.over = true;
    running = null;
    setRunning(false);
    await following;
  }
  return undefined;
}

function ending(finish, calls) {
  if (finish === "length") return "Stopped at the token limit; raise it in the settings.";
  if (finish === "tool_calls") return `The model calls ${calls === 1 ? "a tool" : `${calls} tools`}; enter what each call returns and send the results.`;
  return "Done.";
}

async function refusal(response) {
  const error = await response.json().catch(() => null);
  const wait = response.headers.get("retry-after");
  const message = error?.error?.message ?? `The gateway returned status ${response.status}.`;
  return new Error(wait ? `${message} (try again in ${wait} s)` : message);
}

function setRunning(now) {
  const [askButton, stop] = [byId("ask"), byId("stop")];
  for (const button of document.querySelectorAll("[data-sends]")) button.setAttribute("aria-disabled", String(now));
  if (!now && document.activeElement === stop) askButton.focus();
  stop.disabled = !now;
}

// --- the way of a request ------------------------------------------------------------------------------------------

// Ask the gateway where the request is until it has ended and every pod has reported.
async function follow(request) {
  let rest = 8; // looks after the end: a pod's report may come a little later than the last token
  while (rest > 0) {
    await pause(POLL_REQUEST_MS); // first of all: the gateway must have heard of it
    const timeline = await getJson(`debug/requests/${request.id}`).catch(() => null);
    if (running && request.over) return; // the next question has begun
    if (timeline) showJourney(timeline, request);
    if (request.over) {
      rest -= 1;
      const finished = timeline?.finished > 0;
      if (finished && (timeline.status !== 200 || timeline.phases.some((phase) => phase.name === "decode"))) return;
    }
  }
}

function clearJourney() {
  for (const stage of byId("stages").children) setStage(stage.dataset.stage, "idle", "waiting");
  byId("figures").replaceChildren();
  byId("phases").replaceChildren();
  byId("timeline").hidden = true;
  byId("request-id").textContent = "";
}

function setStage(name, state, text, where = "") {
  const item = byId("stages").querySelector(`[data-stage="${name}"]`);
  item.dataset.state = state;
  item.querySelector(".state").textContent = text;
  item.querySelector(".where").textContent = where;
}

function showJourney(timeline, request) {
  const { timings, media, attempts, phases, status } = timeline;
  const took = (name) => phases.some((phase) => phase.name === name);
  const placed = attempts.length > 0;
  const begun = request.firstToken || timeline.first_token > 0;
  const failed = timeline.finished > 0 && status !== 200;
  const show = (name, done, working, text, where) => {
    if (done) setStage(name, "done", text, where);
    else if (failed) setStage(name, "idle", "not finished", where);
    else setStage(name, working ? "working" : "idle", working ? "working" : "waiting", where);
  };
  const then = (name, target) => (name in timings ? `then ${milliseconds(timings[name])} to ${target}` : "");
  if (media.length === 0 && placed) setStage("encode", "idle", "not needed");
  else {
    const known = took("encode") || took("embedding_transfer");
    show("encode", known || begun, placed, known ? milliseconds(timings.encode ?? 0) : "from cache", then("embedding_transfer", "prefill"));
  }
  const last = attempts.at(-1);
  const prefillPod = last ? [last.prefill_pod, attempts.length > 1 ? `attempt ${attempts.length}` : "", then("kv_transfer", "decode")] : [];
  show("prefill", took("prefill") || begun, placed && media.length === 0, took("prefill") ? milliseconds(timings.prefill) : "done", prefillPod.filter(Boolean).join(", "));
  const decoder = phases.find((phase) => phase.name === "decode" || phase.name === "kv_transfer")?.pod ?? "";
  show("decode", timeline.finished > 0 && !failed, begun, took("decode") ? milliseconds(timings.decode) : "done", decoder);
  byId("request-id").textContent = `Request ${timeline.request_id}`;
  showPhases(timeline);
}

const STAGE_OF = { encode: "encode", embedding_transfer: "encode", prefill: "prefill", kv_transfer: "prefill", decode: "decode" };

function showPhases({ arrived, finished, phases }) {
  const end = Math.max(finished, ...phases.map((phase) => phase.end));
  const span = Math.max(end - arrived, 1e-6);
  const rows = phases.slice(0, SHOWN_PHASES).map((phase) => {
    const bar = make("span", { "data-stage": STAGE_OF[phase.name] ?? "other" });
    bar.style.left = `${(100 * Math.max(0, phase.start - arrived)) / span}%`;
    bar.style.width = `${(100 * (phase.end - phase.start)) / span}%`;
    const name = phase.name.replaceAll("_", " ") + (phase.detail.for ? ` for ${phase.detail.for}` : "");
    return make(
      "tr",
      {},
      make("td", {}, name, make("small", {}, phase.pod)),
      make("td", { className: "number" }, (1000 * (phase.start - arrived)).toFixed(1)),
      make("td", { className: "number" }, (1000 * (phase.end - phase.start)).toFixed(1)),
      make("td", { "aria-hidden": "true" }, make("div", { className: "track" }, bar)),
    );
  });
  byId("phases").replaceChildren(...rows);
  byId("timeline").hidden = rows.length === 0;
}

function showFigures(timings, usage) {
  const figures = [["Time to first token", milliseconds(timings.ttft ?? 0)], ["Total time", milliseconds(timings.total)]];
  if (usage) {
    const details = usage.prompt_tokens_details;
    const media = Object.keys(KINDS).filter((kind) => details[`${kind}_tokens`]).map((kind) => `${kind} ${details[`${kind}_tokens`]}`);
    figures.push(["Prompt tokens", media.length ? `${usage.prompt_tokens} (${media.join(", ")})` : `${usage.prompt_tokens}`]);
    if (details.cached_tokens) figures.push(["Cached prompt tokens", `${details.cached_tokens}`]);
    if (details.degraded_by?.length) figures.push(["Media reduced because of", details.degraded_by.join(", ")]);
    figures.push(["Answer tokens", `${usage.completion_tokens}`]);
    const seconds = (timings.total - (timings.ttft ?? 0)) / 1000;
    if (usage.completion_tokens > 1 && seconds > 0) figures.push(["Tokens per second", ((usage.completion_tokens - 1) / seconds).toFixed(1)]);
  }
  byId("figures").replaceChildren(...figures.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

// --- pods ----------------------------------------------------------------------------------------------------------

function podRow(pod) {
  const { load } = pod;
  const waiting = Object.entries(load.encode_queued_work).filter(([, work]) => work).map(([kind, work]) => `${kind} ${work}`);
  if (load.prefill_waiting_tokens) waiting.push(`${load.prefill_waiting_tokens} tokens`);
  if (load.decode_waiting) waiting.push(`${load.decode_waiting} sequences`);
  const work = [];
  if (pod.roles.includes("encode")) work.push(`${load.encode_running} encoding`);
  if (load.decode_max_sequences) work.push(`${load.decode_running} of ${load.decode_max_sequences}`);
  const used = load.kv_blocks_total - load.kv_blocks_free;
  const kv = load.kv_blocks_total
    ? [make("meter", { max: load.kv_blocks_total, value: used, "aria-label": `KV blocks of ${pod.pod}` }), ` ${used} of ${load.kv_blocks_total}`]
    : ["–"];
  return make(
    "tr",
    {},
    make("td", {}, pod.pod),
    make("td", {}, ...pod.roles.map((role) => make("span", { className: "role", "data-stage": role }, role))),
    make("td", {}, pod.state),
    make("td", { className: "number" }, waiting.join(", ") || "0"),
    make("td", { className: "number" }, work.join(", ") || "–"),
    make("td", {}, ...kv),
  );
}

async function watchPods() {
  for (;;) {
    if (!document.hidden) {
      try {
        if (!model) await findModel();
        if (!ADMIN && !NEEDS_KEY) return;
        if (ADMIN) await showPods();
      } catch (error) {
        if (error.status !== 401) byId("pods-note").textContent = "The gateway does not respond; retrying.";
      }
    }
    await pause(POLL_PODS_MS);
  }
}

async function showPods() {
  const state = await getJson("debug/state");
  limits = state.limits;
  byId("access").textContent = state.auth.enabled ? "An API key is needed to use the model; anyone who can reach this port sees pods and requests." : OPEN_TO_ALL;
  byId("pods").replaceChildren(...state.pods.map(podRow));
  const more = state.num_pods - state.pods.length;
  const requests = `${state.running} request${state.running === 1 ? "" : "s"} in flight at this gateway.`;
  byId("pods-note").textContent = more > 0 ? `${requests} ${more} more pods are not shown.` : requests;
}

async function findModel() {
  const tried = key;
  if (NEEDS_KEY && (!tried || tried === refusedKey)) {
    byId("served").textContent = tried ? "The gateway does not accept this API key." : "Enter an API key to begin.";
    return;
  }
  const { data } = await getJson("v1/models").catch((error) => {
    if (error.status === 401) refusedKey = tried;
    throw error;
  });
  if (tried !== key) return; // another was entered meanwhile
  if (data.length === 0) {
    byId("served").textContent = "This API key allows no model that is served here.";
    return;
  }
  [model] = data;
  document.title = `Try ${model.id}`;
  byId("served").textContent = `${model.id} accepts ${model.modalities.join(", ")}; at most ${model.max_model_len} tokens in all.`;
  for (const button of document.querySelectorAll("[data-kind]")) button.hidden = !model.modalities.includes(button.dataset.kind);
}

// --- layout --------------------------------------------------------------------------------------------------------

const LAYOUT_KEY = "mmd-layout";

function lay(out) {
  const choice = byId("layout");
  if (![...choice.options].some((option) => option.value === out)) return;
  choice.value = out;
  document.body.dataset.layout = out;
}

function remembered(key, value) {
  try { // a browser may keep nothing for us
    if (value !== undefined) localStorage.setItem(key, value);
    return localStorage.getItem(key);
  } catch {
    return value;
  }
}

// --- wiring --------------------------------------------------------------------------------------------------------

byId("form").addEventListener("submit", ask);
byId("key").addEventListener("change", (event) => {
  const typed = event.target.value.trim();
  key = /^[!-~]*$/.test(typed) ? typed : ""; // other characters cannot be sent
  model = null;
});
byId("form").addEventListener("invalid", ({ target }) => target.closest("details")?.setAttribute("open", ""), true);
byId("stop").addEventListener("click", () => running?.abort());
byId("question").addEventListener("keydown", submitOnEnter);
byId("tools").addEventListener("input", () => showToolsFault(""));
byId("files").addEventListener("change", (event) => {
  [...event.target.files].forEach(attach);
  event.target.value = ""; // the same file may be chosen again
});
byId("draw").addEventListener("click", drawCircle);
byId("tone").addEventListener("click", makeTone);
document.addEventListener("paste", (event) => [...event.clipboardData.files].forEach(attach));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  byId("drop").classList.add("over");
});
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) byId("drop").classList.remove("over"); });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  byId("drop").classList.remove("over");
  [...event.dataTransfer.files].forEach(attach);
});
addEventListener("pagehide", () => running?.abort());
byId("layout").addEventListener("change", (event) => lay(remembered(LAYOUT_KEY, event.target.value)));
lay(remembered(LAYOUT_KEY));

for (const part of document.querySelectorAll("[data-internal]")) part.hidden = !ADMIN;
byId("key-field").hidden = !NEEDS_KEY;
if (!ADMIN && !NEEDS_KEY) byId("access").textContent = OPEN_TO_ALL;
watchPods();
