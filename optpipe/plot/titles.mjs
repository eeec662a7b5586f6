// Titles of figures, on as many lines as the figure's width asks for: Bokeh cuts what does not fit.

const pen = document.createElement("canvas").getContext("2d")

// Lines break after commas and colons, and between words only where that is not enough.
function wrapped(text, {text_font, text_font_size, text_font_style}, width) {
  pen.font = `${text_font_style} ${text_font_size} ${text_font}`
  const fits = (line) => pen.measureText(line).width <= width
  const parts = text.split(/(?<=[,:]) /).flatMap((part) => (fits(part) ? part : part.split(" ")))
  const lines = []
  for (const part of parts) {
    const longer = `${lines.at(-1)} ${part}`
    if (lines.length && fits(longer)) lines[lines.length - 1] = longer
    else lines.push(part)
  }
  return lines.join("\n")
}

// The title of a figure that is laid out as `figure` is.
function entitle(title, text, {inner_width, min_border_right}) {
  title.text = wrapped(text, title, inner_width + min_border_right)
}
