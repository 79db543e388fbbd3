// One answer: its canvas at any step, a scrubber, its step map and its counters.
//
// Whatever a model writes is put into the page as text, never as markup.

const REPLAY_MILLISECONDS = 400;

// 0 for a position that is certain, towards 1 for one that may become anything.
function heat(nats) {
  return 1 - Math.exp(-nats);
}

// Characters that would not be seen.
function visible(token) {
  return token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

// Nodes of a grid, as many as there are positions, among which arrow keys move.
class Grid {
  constructor(node, told) {
    this.node = node;
    this.told = told;
    this.current = 0;
    node.addEventListener("keydown", (event) => this.#move(event));
    node.addEventListener("focusin", (event) => this.#choose(event.target));
    node.addEventListener("pointerover", (event) => this.#tell(event.target));
  }

  // Show positions: {text, small, label, heat, isKept, isChanged} each.
  show(positions) {
    while (this.node.childElementCount > positions.length) this.node.lastElementChild.remove();
    while (this.node.childElementCount < positions.length) this.node.append(newCell());
    this.current = Math.max(0, Math.min(this.current, positions.length - 1));
    positions.forEach((position, index) => {
      const cell = this.node.children[index];
      const [text, small] = cell.children;
      text.textContent = position.text;
      small.textContent = position.small ?? "";
      cell.setAttribute("aria-label", position.label);
      cell.setAttribute("aria-selected", index === this.current);
      cell.title = position.label;
      cell.tabIndex = index === this.current ? 0 : -1;
      cell.style.setProperty("--heat", position.heat.toFixed(3));
      cell.classList.toggle("kept", position.isKept);
      cell.classList.toggle("changed", Boolean(position.isChanged));
    });
    if (this.node.contains(document.activeElement)) this.#tell(document.activeElement);
  }

  #move(event) {
    const columns = getComputedStyle(this.node).gridTemplateColumns.split(" ").length;
    const last = this.node.childElementCount - 1;
    const to = {
      ArrowLeft: this.current - 1, ArrowRight: this.current + 1,
      ArrowUp: this.current - columns, ArrowDown: this.current + columns,
      Home: 0, End: last,
    }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    if (to >= 0 && to <= last) this.node.children[to].focus();
  }

  #choose(cell) {
    const index = [...this.node.children].indexOf(cell);
    if (index < 0) return;
    for (const [i, other] of [[this.current, this.node.children[this.current]], [index, cell]]) {
      other?.setAttribute("aria-selected", i === index);
      if (other) other.tabIndex = i === index ? 0 : -1;
    }
    this.current = index;
    this.#tell(cell);
  }

  #tell(target) {
    const cell = target.closest?.("[role=option]");
    if (cell) this.told(cell.title);
  }
}

function newCell() {
  const cell = document.createElement("div");
  cell.setAttribute("role", "option");
  cell.className = "cell";
  cell.append(document.createElement("span"), document.createElement("small"));
  return cell;
}

export class Panel {
  constructor(title) {
    const template = document.getElementById("panel");
    this.node = template.content.firstElementChild.cloneNode(true);
    const find = (selector) => this.node.querySelector(selector);
    find("h3").textContent = title;
    this.node.setAttribute("aria-label", title);
    this.state = find(".state");
    this.range = find("input[type=range]");
    this.output = find("output");
    this.play = find(".play");
    this.committed = find(".committed");
    this.draft = find(".draft");
    this.counters = find(".counters");
    const told = (text) => { find(".position").textContent = text; };
    this.canvas = new Grid(find(".canvas"), told);
    this.map = new Grid(find(".map"), told);
    this.frames = [];
    this.decided = [];
    this.text = "";
    this.numTokens = null;
    this.begun = this.ended = performance.now();
    this.play.disabled = true;
    this.range.addEventListener("input", () => { this.#pause(); this.#show(this.range.valueAsNumber); });
    this.play.addEventListener("click", () => (this.replaying ? this.#pause() : this.#replay()));
    this.state.textContent = "Waiting for the first step.";
  }

  // Take a chunk of the answer. Returns the text that it commits.
  take(chunk) {
    this.ended = performance.now();
    if (chunk.type === "diffusion_frame") this.#takeFrame(chunk);
    else if (chunk.type === "diffusion_step_map") this.#takeSteps(chunk);
    if (chunk.usage) this.numTokens = chunk.usage.completion_tokens;
    const delta = chunk.choices?.[0]?.delta ?? {};
    const text = (delta.reasoning ?? delta.reasoning_content ?? "") + (delta.content ?? "");
    if (text) this.#commit(text);
    this.#count();
    return delta.content ?? "";
  }

  // Text comes behind the last frame of the canvas that it is of, and need not be what that frame showed.
  #commit(text) {
    this.text += text;
    const last = this.frames.findLast((frame) => frame.is_last);
    if (last) last.after = this.text;
    if (this.frames.length) this.#show(this.range.valueAsNumber);
  }

  #isAtEnd() {
    return !this.replaying && this.range.valueAsNumber >= this.frames.length - 1;
  }

  #takeFrame(frame) {
    const follows = this.#isAtEnd();
    this.frames.push(frame);
    this.range.max = this.frames.length - 1;
    this.range.disabled = this.play.disabled = false;
    if (follows) this.#show(this.frames.length - 1);
    const again = frame.begins_anew ? ", begun again" : "";
    this.state.textContent = `Canvas ${frame.block + 1}${again}, step ${frame.step} of at most ${frame.total}.`;
  }

  #takeSteps({ block, steps }) {
    const last = this.frames.findLast((frame) => frame.block === block);
    steps.forEach((step, index) => {
      const token = last?.tokens?.[index] ?? "";
      this.decided.push({
        text: visible(token),
        small: `${step}`,
        label: `Token ${this.decided.length + 1}, ${JSON.stringify(token)}: ` +
          (step ? `decided by step ${step} of canvas ${block + 1}` : `known before canvas ${block + 1} began`),
        heat: last ? step / last.total : 0,
        isKept: true,
      });
    });
    this.map.show(this.decided);
  }

  // The answer is whole, or will not be: say how it ended.
  end(sentence) {
    this.state.textContent = sentence;
    this.#count();
  }

  #show(index) {
    const frame = this.frames[index];
    if (!frame) return;
    const earlier = this.frames[index - 1];
    const tokens = frame.tokens ?? [];
    this.canvas.show(tokens.map((token, i) => {
      const nats = frame.entropy?.[i] ?? 0;
      const isKept = Boolean(frame.kept?.[i]);
      const isSame = earlier?.block !== frame.block || earlier.tokens[i] === token;
      return {
        text: visible(token),
        label: `Position ${i + 1}, ${JSON.stringify(token)}: entropy ${nats.toFixed(2)} nats, ` +
          `${isKept ? "kept" : "may still change"}${isSame ? "" : ", changed in this step"}`,
        heat: heat(nats),
        isKept,
        isChanged: !isSame,
      };
    }));
    const where = `canvas ${frame.block + 1}, step ${frame.step} of at most ${frame.total}`;
    this.range.value = index;
    this.range.setAttribute("aria-valuetext", where);
    const mean = (frame.entropy ?? []).reduce((sum, nats) => sum + nats, 0) / (tokens.length || 1);
    const numKept = (frame.kept ?? []).filter(Boolean).length;
    this.output.textContent = `${where}: ${numKept} of ${tokens.length} kept, mean entropy ${mean.toFixed(2)} nats`;
    const before = this.frames.findLast((other) => other.block < frame.block && other.after);
    this.committed.textContent = frame.after ?? before?.after ?? "";
    this.draft.textContent = frame.after === undefined ? frame.text : "";
  }

  #replay() {
    if (this.range.valueAsNumber >= this.frames.length - 1) this.#show(0);
    this.play.textContent = "Pause";
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
  }

  // Let go of the timer; the panel is taken off the page.
  close() {
    this.#pause();
  }

  #count() {
    const stepsOf = new Map();
    for (const { block, step } of this.frames) stepsOf.set(block, step);
    const steps = [...stepsOf.values()].reduce((sum, n) => sum + n, 0);
    const numTokens = this.numTokens ?? this.decided.length;
    const seconds = (this.ended - this.begun) / 1000;
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
