// One answer: its canvas at any step, a scrubber, its step map and its counters.
//
// Whatever a model writes is put into the page as text, never as markup.

import { Grid, visible } from "./grid.js";

const REPLAY_MILLISECONDS = 400;
const CLOCK_MILLISECONDS = 100;
const NO_CANVAS = "This way writes one token after another, so that there is no canvas.";
const HINT = "Point at a position, or move with the arrow keys.";

// 0 for a position that is certain, towards 1 for one that may become anything.
function heat(nats) {
  return 1 - Math.exp(-nats);
}

// A constraint may take a canvas past its step cap.
function stepInWords({ step, total }) {
  return step > total ? `step ${step}, ${step - total} past the cap of ${total}` : `step ${step} of at most ${total}`;
}

export class Panel {
  // `title` is nodes for the heading, `endTokens` the texts of the tokens that end an answer, `canvasLength` tokens,
  // 0 where no canvas is denoised.
  constructor(title, endTokens, canvasLength) {
    const template = document.getElementById("panel");
    this.node = template.content.firstElementChild.cloneNode(true);
    const find = (selector) => this.node.querySelector(selector);
    find("h3").append(...title);
    this.node.setAttribute("aria-label", find("h3").textContent);
    this.endTokens = new Set(endTokens);
    this.state = find(".state");
    this.range = find("input[type=range]");
    this.output = find("output");
    this.play = find(".play");
    this.emitted = find(".emitted");
    this.draft = find(".draft");
    this.counters = find(".counters");
    const position = find(".position");
    position.textContent = canvasLength ? HINT : NO_CANVAS;
    const onPosition = (text) => { position.textContent = text; };
    this.canvas = new Grid(find(".canvas"), onPosition);
    this.map = new Grid(find(".map"), onPosition);
    this.frames = [];
    this.decided = [];
    this.hasThought = false;
    this.numTokens = null;
    this.finish = {};
    this.begun = this.ended = performance.now();
    this.play.disabled = true;
    this.range.addEventListener("input", () => { this.#pause(); this.#show(this.range.valueAsNumber); });
    this.play.addEventListener("click", () => (this.replaying ? this.#pause() : this.#replay()));
    this.state.textContent = `Waiting for the first ${canvasLength ? "step" : "token"}`;
    this.node.classList.add("live");
    // A server's first request takes long: until it answers there is an empty canvas, and time passes.
    this.canvas.show(Array.from({ length: canvasLength }, (_, i) => (
      { text: "", label: `Position ${i + 1}, before the first step`, heat: 0, isKept: false })));
    this.clock = setInterval(() => this.#count(performance.now()), CLOCK_MILLISECONDS);
    this.#count();
  }

  // Take a chunk of the answer. Returns the text that it emits.
  take(chunk) {
    this.ended = performance.now();
    if (chunk.type === "diffusion_frame") this.#takeFrame(chunk);
    else if (chunk.type === "diffusion_step_map") this.#takeSteps(chunk);
    if (chunk.usage) this.numTokens = chunk.usage.completion_tokens;
    const [choice] = chunk.choices ?? [];
    const delta = choice?.delta ?? {};
    if (choice?.finish_reason) this.finish = choice;
    this.hasThought ||= Boolean(delta.reasoning ?? delta.reasoning_content);
    this.#count();
    const text = delta.content ?? "";
    if (!this.frames.length) this.emitted.append(text);
    return text;
  }

  #isAtEnd() {
    return !this.replaying && this.range.valueAsNumber >= this.frames.length - 1;
  }

  #takeFrame(frame) {
    const follows = this.#isAtEnd();
    const earlier = this.frames.findLast((other) => other.block < frame.block);
    // The last frame of a canvas holds what is emitted; over chat a thought is apart from the text.
    const before = earlier ? earlier.before + earlier.written : "";
    this.frames.push({ ...frame, before, written: (frame.reasoning ?? "") + frame.text });
    this.range.max = this.frames.length - 1;
    this.range.disabled = this.play.disabled = false;
    if (follows) this.#show(this.frames.length - 1);
    this.state.textContent = `Denoising canvas ${frame.block + 1}${frame.begins_anew ? ", begun again" : ""}`;
  }

  #takeSteps({ block, steps }) {
    const last = this.frames.findLast((frame) => frame.block === block);
    const most = Math.max(1, last?.step ?? 0, ...steps);
    steps.forEach((step, index) => {
      const token = last?.tokens?.[index] ?? "";
      this.decided.push({
        text: visible(token),
        small: `${step}`,
        label: `Token ${this.decided.length + 1}, ${JSON.stringify(token)}: ` +
          (step ? `decided by step ${step} of canvas ${block + 1}` : `known before canvas ${block + 1} began`),
        heat: step / most,
        isKept: true,
      });
    });
    this.map.show(this.decided);
  }

  // The answer is whole, or will not be: `how` it ended, in a few words.
  end(how) {
    this.state.textContent = how;
    this.node.classList.remove("live");
    clearInterval(this.clock);
    this.#count();
  }

  // Why an answer that is whole has no text.
  whyEmpty() {
    const { finish_reason: reason, stop_reason: cause } = this.finish;
    const numTokens = this.numTokens ?? this.decided.length;
    const tokens = `${numTokens} token${numTokens === 1 ? "" : "s"}`;
    const after = numTokens > 1 ? `after ${tokens} without text` : "with its first token";
    return {
      stop: `the model ended it ${this.hasThought ? "after its thought" : after}`,
      length: typeof cause === "string" ? cause : `it was cut at its longest, ${tokens}`,
      repetition: "its tokens repeated themselves",
      abort: "the server gave it up",
    }[reason] ?? (reason ? `it ended with "${reason}"` : "the server does not say why");
  }

  #show(index) {
    const frame = this.frames[index];
    if (!frame) return;
    const earlier = this.frames[index - 1];
    const tokens = frame.tokens ?? [];
    const positions = tokens.map((token, i) => {
      const nats = frame.entropy?.[i] ?? 0;
      const isKept = Boolean(frame.kept?.[i]);
      const isSame = earlier?.block !== frame.block || earlier.tokens[i] === token;
      return {
        text: visible(token),
        label: `Position ${i + 1}, ${JSON.stringify(token)}: entropy ${nats.toFixed(2)} nats, ` +
          `${isKept ? "kept" : "may still change"}${isSame ? "" : ", changed in this step"}` +
          (this.endTokens.has(token) ? "; it ends the answer, and is not part of it" : ""),
        heat: heat(nats),
        isKept,
        isChanged: !isSame,
        isEnd: this.endTokens.has(token),
      };
    });
    this.canvas.show(positions, ...this.#fold(tokens));
    const numCanvases = Math.max(...this.frames.map(({ block }) => block)) + 1;
    const where = `canvas ${frame.block + 1} of ${numCanvases}, ${stepInWords(frame)}`;
    this.range.value = index;
    this.range.setAttribute("aria-valuetext", where);
    const mean = (frame.entropy ?? []).reduce((sum, nats) => sum + nats, 0) / (tokens.length || 1);
    const numKept = (frame.kept ?? []).filter(Boolean).length;
    this.output.textContent = `${where}: ${numKept} of ${tokens.length} kept, mean entropy ${mean.toFixed(2)} nats`;
    this.emitted.textContent = frame.before + (frame.is_last ? frame.written : "");
    this.draft.textContent = frame.is_last ? "" : frame.written;
  }

  // How many positions are up to the first end token, and what to call those after it.
  #fold(tokens) {
    const end = tokens.findIndex((token) => this.endTokens.has(token));
    const after = end < 0 ? [] : tokens.slice(end + 1);
    if (!after.length) return [tokens.length, ""];
    const noun = after.length === 1 ? "end token" : "end tokens";
    const areEnds = after.every((token) => this.endTokens.has(token));
    return [end + 1, `${after.length} ${areEnds ? noun : "after the end"}`];
  }

  #replay() {
    if (this.range.valueAsNumber >= this.frames.length - 1) this.#show(0);
    this.play.textContent = "Pause";
    this.play.classList.add("playing");
    this.replaying = setInterval(() => {
      const next = this.range.valueAsNumber + 1;
      if (next >= this.frames.length) this.#pause();
      else this.#show(next);
    }, REPLAY_MILLISECONDS);
  }

  #pause() {
    clearInterval(this.replaying);
    this.replaying = null;
    this.play.textContent = "Replay";
    this.play.classList.remove("playing");
  }

  // Let go of the timers; the panel is taken off the page.
  close() {
    clearInterval(this.clock);
    this.#pause();
  }

  #count(now = this.ended) {
    const stepsOf = new Map();
    for (const { block, step } of this.frames) stepsOf.set(block, step);
    const steps = [...stepsOf.values()].reduce((sum, n) => sum + n, 0);
    const numTokens = this.numTokens ?? this.decided.length;
    const seconds = (now - this.begun) / 1000;
    const rows = [
      ["Canvases", stepsOf.size],
      ["Denoising steps", steps],
      ["Tokens", numTokens],
      ["Tokens a step", steps ? (numTokens / steps).toFixed(1) : "–"],
      ["Tokens a second", seconds ? (numTokens / seconds).toFixed(1) : "–"],
      ["Seconds", seconds.toFixed(2)],
    ];
    this.counters.replaceChildren(...rows.map(([name, value]) => {
      const row = document.createElement("div");
      const term = document.createElement("dt");
      const number = document.createElement("dd");
      term.textContent = name;
      number.textContent = value;
      row.append(term, number);
      return row;
    }));
  }
}

// What the colours of a canvas mean.
export function fillScale(list) {
  for (const nats of [0, 0.2, 0.5, 1, 2, 4]) {
    const item = document.createElement("li");
    item.className = "cell kept";
    item.textContent = nats;
    item.style.setProperty("--heat", heat(nats).toFixed(3));
    list.append(item);
  }
}
