#pragma once

#include <algorithm>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tesserae/cost/curve.h"
#include "tesserae/cost/links.h"

namespace tesserae::cost {

/// How fast a kind of computer does what a training step consists of: read off data sheets, or measured by `tesserae
/// probe` while all ranks of a host do the same at once. Bytes, seconds, and operations (additions and
/// multiplications).
struct Machine {
  /// What a library keeps once it has multiplied: it copies an operand in another order, in parts.
  struct Workspaces {
    Curve bytes;       ///< by the elements that are copied at once; unknown: nothing is kept
    double rows = 0;   ///< of the result: with fewer nothing is copied
    double depth = 0;  ///< of the operand's inner dimension, as much is copied at once

    /// Elements that are copied for [m, k] times [k, n].
    double elements(double m, double k, double n) const { return m < rows ? 0 : n * std::min(k, depth); }

    bool operator==(const Workspaces&) const = default;
  };

  /// What one rank computes with, for parameters and activations of one dtype.
  struct Compute {
    Curve products;     ///< operations/s of a linear layer, forward and backward, by the cube root of tokens * in * out
    Curve weights;      ///< bytes/s of weights that no cache keeps, with their gradients, by how many a rank has: what
                        ///< products take longer for them; unknown: nothing
    Curve attention;    ///< operations/s of causal attention, forward and backward, by the tokens of a sequence
    Curve activations;  ///< bytes/s: of what a block keeps for its backward, by how much that is; norms, rotary
                        ///< positions, gates and sums of it, forward and backward
    Curve loss;         ///< the same of logits and their loss
    double share_more = 0;      ///< of what the above add up to: what whole steps compute longer
    double share_split = 0;     ///< where layers are split: the share of computing for which their ranks wait besides
    double for_units = 0;       ///< seconds of each unit and micro-batch beside all that is known
    double for_parameters = 0;  ///< the same of a step, for each byte of a rank's parameters
    double process = 0;         ///< bytes that a rank takes in its place beside its model, without workspaces
    Workspaces workspaces;      ///< of its products
    bool widened = false;       ///< products are of fp32 copies, which take memory (tensor::widens_products)

    bool operator==(const Compute&) const = default;
  };

  std::string name;
  bool measured = false;
  int per_host = 8;                        ///< ranks
  double memory = 80e9;                    ///< of a place: a device, or a host whose ranks share it
  bool shares_place = false;               ///< the ranks of a host use the same memory
  bool shared_copy = false;                ///< Facts::shared_copy
  std::map<std::string, Compute> compute;  ///< by dtype: "fp32", "bf16", "fp16"
  Curve optimizer;                         ///< bytes/s of masters, state and gradients, by how many there are
  Curve gather, reduce, all_reduce;        ///< bytes/s that a rank sends in a host, by the bytes it sends in one call
  Links links;                             ///< what is used where a curve is not known, and between hosts
  bool knows_network = false;              ///< links.between is that of this machine
  double overlap = 1;                      ///< share of what lanes do that computing hides, at best
  double meeting = 0;  ///< seconds that a rank which has computed waits for the others, beyond what it computes

  /// Throws InvalidArgument for a dtype that the machine does not know, naming those that it does.
  const Compute& of(const std::string& dtype) const;

  bool operator==(const Machine&) const = default;
};

/// What the makers say, of the devices that people plan for, at a share of the peak that is in each one's name.
const std::vector<Machine>& data_sheets();

/// The data sheet of that name (the part before the blank, in any case: "h100"). Throws InvalidArgument with all names.
const Machine& data_sheet(const std::string& name);

/// The short names of all, with commas, for messages.
std::string sheet_names();

nlohmann::ordered_json to_json(const Machine& machine);
/// Throws InvalidArgument for what to_json() does not write.
Machine machine_from(const nlohmann::json& document);

}  // namespace tesserae::cost
