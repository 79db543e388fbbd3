// Positions of a canvas or tokens of an answer, among which arrow keys move.

// Pixels between two cells, and a little more.
const GAP = 6;

// Characters that would not be seen.
export function visible(token) {
  return token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

export class Grid {
  // `node` holds a list box and, where what follows an answer's end is folded, a button.
  constructor(node, onPosition) {
    this.list = node.querySelector("[role=listbox]");
    this.fold = node.querySelector(".fold");
    this.onPosition = onPosition;
    this.cells = [];
    this.current = 0;
    this.isOpen = false;
    this.list.addEventListener("keydown", (event) => this.#move(event));
    this.list.addEventListener("focusin", (event) => this.#choose(event.target));
    this.list.addEventListener("pointerover", (event) => this.#describe(event.target));
    this.fold?.addEventListener("click", () => {
      this.isOpen = !this.isOpen;
      this.show(...this.shown);
    });
  }

  // Show positions: {text, small, label, heat, isKept, isChanged, isEnd} each.
  // Those from `numShown` on are folded, and `folded` names them.
  show(positions, numShown = positions.length, folded = "") {
    this.shown = [positions, numShown, folded];
    while (this.cells.length > positions.length) this.cells.pop().remove();
    while (this.cells.length < positions.length) this.cells.push(this.list.appendChild(newCell()));
    if (this.isOpen) numShown = positions.length;
    const focused = this.cells.indexOf(document.activeElement);
    this.current = Math.max(0, Math.min(this.current, numShown - 1));
    positions.forEach((position, index) => {
      const cell = this.cells[index];
      const [text, small] = cell.children;
      text.textContent = position.text;
      small.textContent = position.small ?? "";
      cell.hidden = index >= numShown;
      cell.setAttribute("aria-label", position.label);
      cell.setAttribute("aria-selected", index === this.current);
      cell.title = position.label;
      cell.tabIndex = index === this.current ? 0 : -1;
      cell.style.setProperty("--heat", position.heat.toFixed(3));
      cell.classList.toggle("kept", position.isKept);
      cell.classList.toggle("changed", Boolean(position.isChanged));
      cell.classList.toggle("end", Boolean(position.isEnd));
    });
    if (this.fold) this.#showFold(folded);
    // The keyboard is not lost with a position that was folded under it.
    if (focused >= numShown) this.cells[this.current]?.focus();
    else if (focused >= 0) this.#describe(this.cells[focused]);
  }

  #showFold(folded) {
    this.fold.hidden = !folded;
    this.fold.textContent = this.isOpen ? `Hide ${folded}` : `+${folded}`;
    this.fold.setAttribute("aria-expanded", this.isOpen);
  }

  #move(event) {
    const last = this.cells.findLastIndex((cell) => !cell.hidden);
    const to = {
      ArrowLeft: this.current - 1, ArrowRight: this.current + 1,
      ArrowUp: this.#inAnotherRow(-1), ArrowDown: this.#inAnotherRow(1),
      Home: 0, End: last,
    }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    if (to >= 0 && to <= last) this.cells[to].focus();
  }

  // The nearest cell above (-1) or below (1), in the same column; -1 if there is none.
  #inAnotherRow(direction) {
    const from = this.cells[this.current].getBoundingClientRect();
    const middle = (from.left + from.right) / 2;
    for (let index = this.current + direction; this.cells[index]; index += direction) {
      const { left, right, top } = this.cells[index].getBoundingClientRect();
      if (top !== from.top && left - GAP <= middle && middle <= right + GAP) return index;
    }
    return -1;
  }

  #choose(cell) {
    const index = this.cells.indexOf(cell);
    if (index < 0) return;
    for (const [i, other] of [[this.current, this.cells[this.current]], [index, cell]]) {
      other?.setAttribute("aria-selected", i === index);
      if (other) other.tabIndex = i === index ? 0 : -1;
    }
    this.current = index;
    this.#describe(cell);
  }

  #describe(target) {
    const cell = target.closest?.("[role=option]");
    if (cell) this.onPosition(cell.title);
  }
}

function newCell() {
  const cell = document.createElement("div");
  cell.setAttribute("role", "option");
  cell.className = "cell";
  cell.append(document.createElement("span"), document.createElement("small"));
  return cell;
}
