// Follows the pointer: a micro-batch's whole path in every view, and one device's memory below.
// One instance serves all figures of a chart, so what is kept here belongs to the chart.

let pinned = null
let lit = null

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

const nothing = () => ({left: [], right: [], top: [], bottom: [], code: [], cover: [], edge: []})

// The part between start and end of a veil and, on it, of one micro-batch's bars.
function pathOf({left, right, top, bottom, code, microbatch}, wanted, rows, {start, end}, veil) {
  const path = nothing()
  const add = (i0, i1, j0, j1, colour, cover, edge) => {
    if (i1 <= start || i0 >= end) return
    path.left.push(Math.max(i0, start))
    path.right.push(Math.min(i1, end))
    path.top.push(j0)
    path.bottom.push(j1)
    path.code.push(colour)
    path.cover.push(cover)
    path.edge.push(edge)
  }
  add(start, end, rows.start, rows.end, veil, VEIL_COVER, 0)
  for (let i = 0; i < microbatch.length; i++) {
    if (microbatch[i] === wanted) add(left[i], right[i], top[i], bottom[i], code[i], 1, 1)
  }
  return path
}

function paint({parts, time, veil}) {
  for (const {gantt, bars, path} of parts) {
    path.data = lit == null ? nothing() : pathOf(allOf(bars), lit, gantt.y_range, time, veil)
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

function showMemory({curves, devices, shown, limit, memory, end}, device) {
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
  }
  limit.location = most
  memory.title.text = of.label[device]
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
    if (lit != null) paint(chart)
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
