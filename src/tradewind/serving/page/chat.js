"use strict";
/* The playground. Knows: POST v1/chat/completions as a stream, and how an answer is shown. Text is only ever set as text, never as HTML. */
const $ = (id) => document.getElementById(id);
const KEPT = ["system", "temperature", "top-p", "max-tokens", "seed", "tools", "key", "target-ttft", "target-tpot", "target-e2e"]; // in this tab's session

// -- text ---------------------------------------------------------------------------------------------------------------

/** `code` and **bold** inside a line. */
function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) return make("code", "", part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) return make("strong", "", part.slice(2, -2));
    return part;
  });
}

function codeBlock(language, code) {
  const copy = copyButton(() => code);
  return make("div", "block", make("div", "head", make("span", "", language || "text"), copy), make("pre", "", make("code", "", code)));
}

/** The few marks of Markdown that models use most: fences, headings, lists, bold, code. Anything else stays as it was written. */
function rendered(text) {
  const out = [];
  const lines = text.split("\n");
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) out.push(make("p", "", ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    const fence = line.match(/^\s*```\s*([\w+#.-]*)\s*$/);
    const heading = line.match(/^#{1,6}\s+(.+)$/);
    const item = line.match(/^\s*(?:([-*•])|(\d+)[.)])\s+(.+)$/);
    if (fence) {
      flush();
      const code = [];
      while (++at < lines.length && !/^\s*```\s*$/.test(lines[at])) code.push(lines[at]);
      out.push(codeBlock(fence[1], code.join("\n")));
    } else if (heading) {
      flush();
      out.push(make("h3", "", ...inline(heading[1])));
    } else if (item) {
      flush();
      const tag = item[1] ? "ul" : "ol";
      let list = out.at(-1);
      if (list?.localName !== tag || list.closed) {
        list = make(tag);
        if (tag === "ol") list.start = Number(item[2]);
        out.push(list);
      }
      list.append(make("li", "", ...inline(item[3])));
    } else if (!line.trim()) {
      flush();
    } else {
      if (!paragraph.length && out.length) out.at(-1).closed = true;
      paragraph.push(line);
    }
  }
  flush();
  return out;
}

/** The text cut at blank lines outside fences: what is before the last piece does not change any more while an answer grows. */
function pieces(text) {
  const out = [[]];
  let fenced = false;
  for (const line of text.split("\n")) {
    if (/^\s*```/.test(line)) fenced = !fenced;
    if (!fenced && !line.trim()) out.push([]);
    else out.at(-1).push(line);
  }
  return out.filter((lines) => lines.length).map((lines) => lines.join("\n"));
}

/** Shows a growing text; pieces that are the same as before stay as they are, and with them what the reader has selected. */
class Text {
  constructor() {
    this.element = make("div");
    this.known = [];
  }

  show(text) {
    pieces(text).forEach((piece, place) => {
      if (this.known[place] === piece) return;
      this.known[place] = piece;
      const part = make("div", "", ...rendered(piece));
      const old = this.element.children[place];
      if (old) old.replaceWith(part);
      else this.element.append(part);
    });
  }
}

function copyButton(text) {
  const button = make("button", "small", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    const done = await copied(text());
    button.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // no clipboard without HTTPS: the old way
    const area = make("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

// -- one answer ---------------------------------------------------------------------------------------------------------

class Answer {
  constructor() {
    Object.assign(this, { content: "", reasoning: "", calls: [], finish: null, usage: null, timing: null, chunks: 0 });
    this.began = performance.now();
    this.first = this.thought = null;
    this.written = new Text();
    this.called = make("div");
    this.text = make("div", "body caret", this.written.element, this.called);
    this.about = make("div", "about");
    this.element = make("article", "said assistant", this.text, this.about);
    this.element.setAttribute("aria-label", "Answer");
    this.element.setAttribute("aria-busy", "true");
    this.drawn = true;
  }

  /** One chunk of the stream. */
  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.timing) this.timing = chunk.timing;
    for (const { delta, finish_reason: finish } of chunk.choices ?? []) {
      if (delta?.content || delta?.reasoning_content || delta?.tool_calls) {
        this.first ??= performance.now();
        this.chunks += 1;
      }
      if (delta?.reasoning_content) this.reasoning += delta.reasoning_content;
      if (delta?.content || delta?.tool_calls) this.thought ??= performance.now();
      this.content += delta?.content ?? "";
      for (const call of delta?.tool_calls ?? []) {
        const known = (this.calls[call.index] ??= { id: "", name: "", arguments: "" });
        if (call.id) known.id = call.id;
        known.name += call.function?.name ?? "";
        known.arguments += call.function?.arguments ?? "";
      }
      if (finish) this.finish = finish;
    }
    if (this.drawn) { // at most once a frame
      this.drawn = false;
      requestAnimationFrame(() => this.draw());
    }
  }

  draw() {
    this.drawn = true;
    const end = atEnd();
    this.written.show(this.content);
    if (this.calls.length) {
      this.called.replaceChildren(...this.calls.filter(Boolean).map((call) => {
        const block = codeBlock("", pretty(call.arguments));
        block.classList.add("call");
        block.querySelector(".head span").replaceChildren("calls ", make("b", "", call.name));
        return block;
      }));
    }
    if (this.reasoning) {
      if (!this.details) {
        this.details = make("details", "thought", make("summary"), make("div"));
        this.details.open = true;
        this.text.before(this.details);
      }
      const [summary, body] = this.details.children;
      body.textContent = this.reasoning;
      const over = this.thought !== null || this.finish !== null;
      summary.textContent = over ? `Thought for ${showMs((this.thought ?? performance.now()) - this.first)}` : "Thinking …";
      if (over && !this.folded) {
        this.folded = true;
        this.details.open = this.thought === null; // truncated: the thought is all there is
      }
    }
    if (end) toEnd();
  }

  /** The end: `why` is said where the server gave no reason. */
  end(why) {
    this.draw();
    this.text.classList.remove("caret");
    this.element.setAttribute("aria-busy", "false");
    const now = performance.now();
    const parts = [];
    const ttft = this.timing?.ttft_ms ?? (this.first === null ? null : this.first - this.began);
    if (ttft !== null) parts.push(`first token ${showMs(ttft)}`);
    const tokens = this.usage?.completion_tokens ?? this.chunks;
    if (tokens) parts.push(`${tokens} ${this.usage ? "" : "or more "}token${tokens === 1 ? "" : "s"}`);
    const decode = this.timing?.decode_ms ?? (this.first === null ? 0 : now - this.first);
    if (tokens > 1 && decode > 0) parts.push(showRate(((tokens - 1) * 1000) / decode));
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (this.usage) parts.push(`prompt ${this.usage.prompt_tokens}${cached ? `, ${cached} from the cache` : ""}`);
    const reason = why ?? { length: "cut at the limit", tool_calls: "calls a tool", stop: "" }[this.finish] ?? this.finish;
    if (reason) parts.push(reason);
    this.about.replaceChildren(...parts.map((part) => make("span", "", part)));
    if (this.content) this.about.append(copyButton(() => this.content));
  }

  fail(message) {
    this.end("");
    this.element.insertBefore(make("p", "wrong", message), this.about);
  }

  message() {
    const calls = this.calls.filter(Boolean);
    const message = { role: "assistant", content: this.content }; // not null beside calls: some templates cannot
    if (calls.length) {
      message.tool_calls = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    }
    return message;
  }
}

// -- the conversation ---------------------------------------------------------------------------------------------------

const chat = { messages: [], asked: [], pending: [], abort: null, model: null, last: null };

const log = $("log");
const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
const toEnd = () => { log.scrollTop = log.scrollHeight; };

function note(text) {
  $("note").textContent = text;
  $("note").hidden = !text;
}

/** What the settings say, as fields of the request. Throws with a sentence when they cannot be read. */
function fields() {
  const body = { temperature: Number($("temperature").value) };
  if (Number($("top-p").value) < 1) body.top_p = Number($("top-p").value);
  if ($("max-tokens").value) body.max_tokens = Number($("max-tokens").value);
  if ($("seed").value) body.seed = Number($("seed").value);
  const tools = $("tools").value.trim();
  if (tools) {
    try { body.tools = JSON.parse(tools); } catch (error) { throw new Error(`The tools in the settings are no JSON: ${error.message}`); }
  }
  return body;
}

async function modelName() {
  if (chat.model) return chat.model;
  const answer = await fetch("v1/models", { headers: board.headers() });
  if (!answer.ok) throw new Error(await refusal(answer));
  chat.model = (await answer.json()).data[0].id;
  return chat.model;
}

async function refusal(answer) {
  let said = "";
  try { said = (await answer.json()).error.message; } catch { /* no JSON: the status must do */ }
  if (answer.status === 401) needKey();
  return said || `The server answered ${answer.status}.`;
}

/** Reads server-sent events until the end marker; gives each one's data. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const data = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      rest = rest.slice(end + 2);
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function say(text) {
  const tool = chat.pending.length > 0;
  const bubble = make("article", tool ? "said user tool" : "said user", make("div", "body", text));
  bubble.setAttribute("aria-label", tool ? "Result of the tool" : "You");
  $("hello").hidden = true;
  log.append(bubble);
  toEnd();
  chat.messages.push(tool ? { role: "tool", tool_call_id: chat.pending.shift().id, content: text } : { role: "user", content: text });
}

async function ask() {
  const answer = (chat.last = new Answer());
  log.append(answer.element);
  toEnd();
  chat.abort = new AbortController();
  chat.asked = [...chat.messages];
  buttons();
  try {
    const system = $("system").value.trim();
    const body = {
      model: await modelName(),
      messages: [...(system ? [{ role: "system", content: system }] : []), ...chat.messages],
      stream: true,
      stream_options: { include_usage: true },
      timing: true,
      ...fields(),
    };
    const reply = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...board.headers() },
      body: JSON.stringify(body),
      signal: chat.abort.signal,
    });
    if (!reply.ok) throw new Error(await refusal(reply));
    for await (const chunk of events(reply.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      answer.take(chunk);
    }
    if (answer.finish === null) throw new Error("The answer broke off: the connection was lost.");
    answer.end();
    chat.messages.push(answer.message());
    chat.pending = answer.calls.filter(Boolean);
  } catch (error) {
    if (chat.abort?.signal.aborted) {
      answer.end("stopped");
      if (answer.content) chat.messages.push({ role: "assistant", content: answer.content });
    } else {
      answer.fail(error instanceof TypeError ? "The server cannot be reached." : error.message);
    }
  }
  if (chat.last === answer) {
    chat.abort = null;
    const again = make("button", "small", "Try again");
    again.type = "button";
    again.addEventListener("click", retry);
    answer.about.append(again);
    chat.again?.remove();
    chat.again = again;
    toEnd();
    buttons();
    if (matchMedia("(pointer: fine)").matches) $("prompt").focus({ preventScroll: true }); // a phone would open its keyboard
  }
}

function retry() {
  if (chat.abort) return;
  chat.last.element.remove();
  chat.messages = [...chat.asked];
  chat.pending = [];
  ask();
}

function send(event) {
  event?.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || chat.abort) return;
  try { fields(); } catch (error) { return void note(error.message); }
  note("");
  $("prompt").value = "";
  grow();
  say(text);
  if (!chat.pending.length) ask();
  else buttons();
}

function stop() {
  chat.abort?.abort();
}

function clear() {
  stop();
  Object.assign(chat, { messages: [], asked: [], pending: [], abort: null, last: null, again: null });
  for (const old of log.querySelectorAll(".said")) old.remove();
  $("hello").hidden = false;
  note("");
  buttons();
  $("prompt").focus();
}

function buttons() {
  const busy = chat.abort !== null;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("send").disabled = !$("prompt").value.trim();
  $("clear").disabled = !log.querySelector(".said");
  $("prompt").placeholder = chat.pending.length ? `Result of ${chat.pending[0].name}` : "Message";
}

function grow() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  buttons();
}

// -- settings -----------------------------------------------------------------------------------------------------------

function openSettings(open) {
  $("settings").hidden = !open;
  $("settings-button").setAttribute("aria-expanded", String(open));
}

function needKey() {
  if ($("settings").hidden) openSettings(true);
  note("This server asks for an API key: give it in the settings.");
}

function shown() {
  $("temperature-shown").value = $("temperature").value;
  $("top-p-shown").value = $("top-p").value;
}

function remember() {
  shown();
  try {
    sessionStorage.setItem("tradewind", JSON.stringify(Object.fromEntries(KEPT.map((id) => [id, $(id).value]))));
  } catch { /* storage is off: the settings live as long as the page */ }
}

function recall() {
  try {
    const kept = JSON.parse(sessionStorage.getItem("tradewind") ?? "{}");
    for (const id of KEPT) if (typeof kept[id] === "string") $(id).value = kept[id];
  } catch { /* nothing kept, or nothing that can be read */ }
  shown();
}

function view(name) {
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll(".views button")) button.setAttribute("aria-pressed", String(button.dataset.to === name));
}

/** A phone has room for one of both at a time. */
const narrow = matchMedia("(max-width: 820px)");
function fit() {
  if (narrow.matches && document.body.dataset.view === "both") view("chat");
}

let asked = false;
board.key = () => $("key").value.trim();
board.onRefused = () => {
  if (!asked && !board.key()) needKey();
  asked = true;
};
recall();
fit();
narrow.addEventListener("change", fit);
board.build();
board.run();
$("composer").addEventListener("submit", send);
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", clear);
$("settings").addEventListener("submit", (event) => event.preventDefault());
for (const id of ["settings", "targets-form"]) $(id).addEventListener("input", remember);
$("key").addEventListener("change", () => { note(""); board.poll(); });
$("settings-button").addEventListener("click", () => openSettings($("settings").hidden));
for (const idea of document.querySelectorAll(".ideas button")) {
  idea.addEventListener("click", () => { $("prompt").value = idea.textContent; send(); });
}
for (const button of document.querySelectorAll(".views button")) button.addEventListener("click", () => view(button.dataset.to));
buttons();
