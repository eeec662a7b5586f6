// What a tooltip says about one bar. Text only: a device may be called anything.

function time(ms) {
  const digits = Math.abs(ms) >= 100 || ms === 0
    ? {minimumFractionDigits: 1, maximumFractionDigits: 1}
    : {maximumSignificantDigits: 4}
  return `${ms.toLocaleString("en-US", digits)} ms`
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"]
  let value = bytes
  let unit = 0
  while (Math.abs(value) >= 1024 && unit < units.length - 1) {
    value /= 1024
    unit += 1
  }
  return `${unit === 0 ? value : value.toFixed(1)} ${units[unit]}`
}

function change(before, after) {
  if (before === after) return `memory: ${size(before)}, unchanged`
  const sign = after > before ? "+" : "\u2212"
  return `memory: ${size(before)} before, ${size(after)} after (${sign}${size(Math.abs(after - before))})`
}

export default ({bars, kinds, devices}, _obj, {vars}) => {
  const {left, right, code, device, stage, microbatch, before, after} = bars.data
  const i = vars.index
  const what = kinds[code[i] >> 1]
  const owner = microbatch[i] < 0 ? "" : ` of micro-batch ${microbatch[i]}, stage ${stage[i]}`
  const lines = [
    `${what}${owner}`,
    `on ${devices[device[i]]}`,
    `${time(left[i])} to ${time(right[i])}: ${time(right[i] - left[i])}`,
    ...(before[i] < 0 ? [] : [change(before[i], after[i])]),
  ]
  return lines.map((line, row) => {
    const div = document.createElement("div")
    div.textContent = line
    div.style.font = `${row === 0 ? 600 : 400} 12px/1.4 system-ui, sans-serif`
    return div
  })
}
