// What the sliders are factors of.

/** Return a problem with the factors of the sliders taken out again. */
export function unvaried(problem, values, { num_microbatches }) {
  const { memory_scale = 1, pcie_scale = 1, link_scale = 1 } = values;
  const over = (value, factor) => (value === null ? null : value / factor);
  return {
    num_microbatches,
    devices: problem.devices.map((device) => ({
      memory_bytes: device.memory_bytes / memory_scale,
      d2h_gb_per_s: over(device.d2h_gb_per_s, pcie_scale),
    })),
    links: problem.links.map((link) => ({
      latency_ms: link.latency_ms,
      bandwidth_gb_per_s: over(link.bandwidth_gb_per_s, link_scale),
    })),
  };
}
