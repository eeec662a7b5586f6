// Follows the pointer: a micro-batch's whole path in every view, and one device's memory below.
// One instance serves all figures of a chart, so what is kept here belongs to the chart.

let pinned = null
let lit = null
let fitting = null

// Of a view with many bars: all of them, and the span of time whose bars are drawn.
const kept = new Map()

const allOf = (bars) => kept.get(bars)?.all ?? bars.data

function between(all, from, to) {
  const rows = []
  for (let i = 0; i < all.left.length; i++) {
    if (all.left[i] <= to && all.right[i] >= from) rows.push(i)
  }
  const some = {}
  for (const [name, column] of Object.entries(all)) {
    some[name] = column.constructor.from(rows, (i) => column[i])
  }
  return some
}

// Bokeh draws every bar of a source, also those outside of the frame. So where there are many, the
// source holds those near the frame, and is filled anew when the frame leaves them or is far
// smaller than what is drawn.
function keepNear(bars, {start, end, bounds: [first, last]}, most) {
  const all = allOf(bars)
  if (all.left.length <= most) return
  const {from, to} = kept.get(bars) ?? {from: first, to: last}
  const width = end - start
  if (start >= from && end <= to && to - from <= 8 * width) return
  const isNearlyAll = 6 * width > last - first
  const near = isNearlyAll ? [first, last] : [start - width, end + width]
  kept.set(bars, {all, from: near[0], to: near[1]})
  bars.data = isNearlyAll ? all : between(all, ...near)
}

const VEIL_COVER = 0.75

const nothing = () => ({
  left: [], right: [], top: [], bottom: [], code: [], cover: [], edge: [], x: [], y: [], text: [],
})

function put(path, bar) {
  for (const [name, value] of Object.entries(bar)) path[name].push(value)
  path.x.push((bar.left + bar.right) / 2)
  path.y.push((bar.top + bar.bottom) / 2)
}

// The part between start and end of a veil and, on it, of one micro-batch's bars with their labels.
function pathOf(part, all, wanted, time, veil) {
  const {start, end} = time
  const [perMs, perRow] = scaleOf(part.gantt, time)
  const {start: bottom, end: top} = part.gantt.y_range
  const path = nothing()
  put(path, {left: start, right: end, top, bottom, code: veil, cover: VEIL_COVER, edge: 0, text: ""})
  for (let i = 0; i < all.microbatch.length; i++) {
    if (all.microbatch[i] !== wanted || all.right[i] <= start || all.left[i] >= end) continue
    const bar = {left: Math.max(all.left[i], start), right: Math.min(all.right[i], end),
      top: all.top[i], bottom: all.bottom[i], code: all.code[i], cover: 1, edge: 1}
    const isHigh = (bar.bottom - bar.top) * perRow >= LEAST_HEIGHT
    const width = isHigh ? (bar.right - bar.left) * perMs : 0
    put(path, {...bar, text: labelOf(part, bar.code, all.stage[i], wanted, width)})
  }
  return path
}

function paint({parts, time, veil}) {
  for (const part of parts) {
    part.path.data = lit == null ? nothing() : pathOf(part, allOf(part.bars), lit, time, veil)
  }
}

function light(chart, wanted) {
  if (wanted === lit) return
  lit = wanted
  paint(chart)
}

function barAt({left, right, top, bottom}, x, y) {
  for (let i = left.length - 1; i >= 0; i--) {
    if (left[i] <= x && x <= right[i] && top[i] <= y && y <= bottom[i]) return i
  }
  return -1
}

function showMemory({gantt, curves, devices, shown, limit, memory, end}, device) {
  const of = devices.data
  const first = of.first[device]
  const count = of.length[device]
  const moment = Array.from(curves.data.moments.slice(first, first + count))
  const held = Array.from(curves.data.held.slice(first, first + count))
  moment.push(end)
  held.push(held[count - 1])
  const most = of.limit[device]
  shown.data = {
    moment,
    held,
    zero: held.map(() => 0),
    static: held.map(() => of.static[device]),
    limit: held.map(() => most),
    over: held.map((value) => Math.max(value, most)),
    device: held.map(() => of.name[device]),
  }
  limit.location = most
  entitle(memory, of.label[device], gantt)
}

// What depends on how wide the figures are.
function fit(chart) {
  for (const {gantt, title, headline, memory, devices, select} of chart.parts) {
    entitle(title, headline, gantt)
    entitle(memory, devices.data.label[Number(select.value)], gantt)
  }
  label(chart)
  if (lit != null) paint(chart)
}

function tap(chart, part, event) {
  const {microbatch} = allOf(part.bars)
  const i = barAt(allOf(part.bars), event.x, event.y)
  const wanted = i < 0 || microbatch[i] < 0 ? null : microbatch[i]
  pinned = wanted === pinned ? null : wanted
  chart.follow.value = pinned
  light(chart, pinned)
  const device = Math.round(event.y)
  if (device >= 0 && device < part.devices.data.first.length) part.select.value = `${device}`
}

function hover(chart, {index, renderer}) {
  const [i] = index.indices
  const under = i == null ? -1 : renderer.data_source.data.microbatch[i]
  light(chart, under < 0 ? pinned : under)
}

export default (chart, obj, data) => {
  const {parts, follow, time, most} = chart
  const asked = parts.find(({select}) => select === obj)
  if (asked != null) {
    showMemory(asked, Number(obj.value))
  } else if (obj === time) {
    for (const {bars} of parts) keepNear(bars, time, most)
    relabel(chart)
    if (lit != null) paint(chart)
  } else if (parts.some(({gantt}) => gantt === obj)) {
    // Bokeh is laying out just now, and titles may want another layout.
    clearTimeout(fitting)
    fitting = setTimeout(() => fit(chart))
  } else if (obj === follow) {
    pinned = follow.value
    light(chart, pinned)
  } else if (data?.index != null) {
    hover(chart, data)
  } else if (obj.event_name !== "mouseleave") {
    const part = parts.find(({gantt}) => gantt === obj.origin)
    if (part != null) tap(chart, part, obj)
  } else {
    light(chart, pinned)
  }
}
