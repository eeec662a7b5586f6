// What stands in a bar: the action where there is room, else its letter above its micro-batch. Bars that move
// under the wheel have none, as hundreds of texts would slow it down.

const LABEL_FONT = "10px system-ui, sans-serif"
const LEAST_HEIGHT = 10
const TWO_LINES = 22
const BESIDE = 5
const MOST_LABELS = 500
const SETTLED_MS = 120

const ruler = document.createElement("canvas").getContext("2d")
ruler.font = LABEL_FONT
const DIGIT = ruler.measureText("0").width

const widthOf = (text) => Math.max(...text.split("\n").map((line) => ruler.measureText(line).width))

// The longest text for a bar that is no larger than so many pixels; "" where none is.
function labelOf({letters, hasChunks}, code, stage, microbatch, width, height = LEAST_HEIGHT) {
  if (microbatch < 0 || width < DIGIT + BESIDE) return ""
  const letter = letters[code >> 1]
  const texts = [`${letter}${microbatch}`]
  if (letter && height >= TWO_LINES) texts.push(`${letter}\n${microbatch}`)
  if (hasChunks) texts.unshift(`${stage}${letter}${microbatch}`)
  return texts.find((text) => widthOf(text) + BESIDE <= width) ?? ""
}

// Pixels per ms and per row.
const scaleOf = ({inner_width, inner_height, y_range}, {start, end}) =>
  [inner_width / (end - start), inner_height / Math.abs(y_range.end - y_range.start)]

// Texts in the middle of what is seen of each bar; none where there would be too many.
function labelsOf(part, {left, right, top, bottom, code, stage, microbatch}, time) {
  const {start, end} = time
  const [perMs, perRow] = scaleOf(part.gantt, time)
  const found = {x: [], y: [], text: []}
  for (let i = 0; i < left.length; i++) {
    const from = Math.max(left[i], start)
    const to = Math.min(right[i], end)
    const width = (to - from) * perMs
    const height = (bottom[i] - top[i]) * perRow
    if (width < DIGIT + BESIDE || height < LEAST_HEIGHT) continue
    const text = labelOf(part, code[i], stage[i], microbatch[i], width, height)
    if (text === "") continue
    if (found.x.length === MOST_LABELS) return {x: [], y: [], text: []}
    found.x.push((from + to) / 2)
    found.y.push((top[i] + bottom[i]) / 2)
    found.text.push(text)
  }
  return found
}

let labelledWidth = null
let settling = null

function label({parts, time}) {
  for (const part of parts) {
    const found = labelsOf(part, part.bars.data, time)
    if (found.x.length || part.labels.data.x.length) part.labels.data = found
  }
  labelledWidth = time.end - time.start
}

// Labels move with their bars; what is zoomed gets them again when it rests.
function relabel(chart) {
  const {parts, time} = chart
  if (Math.abs(time.end - time.start - labelledWidth) > 1e-6 * labelledWidth) {
    for (const {labels} of parts) if (labels.data.x.length) labels.data = {x: [], y: [], text: []}
  }
  clearTimeout(settling)
  settling = setTimeout(() => label(chart), SETTLED_MS)
}
