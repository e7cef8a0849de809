#include <algorithm>
#include <cctype>

#include "tesserae/base/error.h"
#include "tesserae/cost/machine.h"

namespace tesserae::cost {
namespace {

// Of the peak that a data sheet prints, what large products reach in training; and how often the bytes that a block
// keeps pass through memory for everything that is no product. Neither is on a data sheet: both are meant to be
// replaced by what `tesserae probe` measures.
constexpr double share_of_peak = 0.5;
constexpr double passes = 6;

/// What the makers print: bytes, bytes/s and operations/s of one device; links in one direction.
struct Sheet {
  const char* name;
  int per_host;
  double memory, bandwidth, bf16, fp32, inside, between;
};

// fp32 is what products reach that are to be exact in fp32 (no TF32). From NVIDIA's data sheets of A100, H100, H200 and
// DGX B200, with the network of a DGX; and AWS's page of trn2.48xlarge, a sixteenth of it.
constexpr Sheet sheets[] = {
    {"a100 (SXM, 80 GB)", 8, 80e9, 2.04e12, 312e12, 19.5e12, 300e9, 25e9},
    {"h100 (SXM, 80 GB)", 8, 80e9, 3.35e12, 989e12, 67e12, 450e9, 50e9},
    {"h200 (SXM, 141 GB)", 8, 141e9, 4.8e12, 989e12, 67e12, 450e9, 50e9},
    {"b200 (SXM, 180 GB)", 8, 180e9, 8e12, 2250e12, 75e12, 900e9, 50e9},
    {"trn2 (Trainium2, 96 GiB)", 16, 96 * 1.073741824e9, 2.9e12, 667e12, 181e12, 640e9, 25e9},
};

Machine machine_of(const Sheet& sheet) {
  const auto compute = [&](double peak) {
    return Machine::Compute{.products = Curve(peak * share_of_peak),
                            .weights = {},  // products as long as they are measured to be
                            .attention = Curve(peak * share_of_peak),
                            .activations = Curve(sheet.bandwidth / passes),
                            .loss = Curve(sheet.bandwidth / passes)};
  };
  Machine machine;
  machine.name = sheet.name;
  machine.per_host = sheet.per_host;
  machine.memory = sheet.memory;
  machine.compute = {{"bf16", compute(sheet.bf16)}, {"fp16", compute(sheet.bf16)}, {"fp32", compute(sheet.fp32)}};
  machine.optimizer = Curve(sheet.bandwidth);
  machine.knows_network = true;
  machine.links = {.inside = sheet.inside,
                   .between = sheet.between,
                   .inside_latency = 2e-5,
                   .between_latency = 5e-5,
                   .memory = sheet.bandwidth};
  return machine;
}

std::string short_name(const Machine& machine) {
  return machine.name.substr(0, machine.name.find(' '));
}

}  // namespace

const std::vector<Machine>& data_sheets() {
  static const std::vector<Machine> all = [] {
    std::vector<Machine> machines;
    for (const Sheet& sheet : sheets) machines.push_back(machine_of(sheet));
    return machines;
  }();
  return all;
}

const Machine& data_sheet(const std::string& name) {
  std::string asked = name;
  std::ranges::transform(asked, asked.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const Machine& machine : data_sheets()) {
    if (short_name(machine) == asked) return machine;
  }
  throw InvalidArgument("data_sheet", cat("no data sheet of \"", name, "\"; there are ", sheet_names()));
}

std::string sheet_names() {
  std::string names;
  for (const Machine& machine : data_sheets()) names += cat(names.empty() ? "" : ", ", short_name(machine));
  return names;
}

}  // namespace tesserae::cost
