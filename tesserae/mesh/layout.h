#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tesserae::mesh {

/// Over how many ranks each part of the training state is split. parameters | gradients | optimizer | ranks of the job.
struct Degrees {
  int parameters = 1;  ///< P: parameters in the compute dtype
  int gradients = 1;   ///< G: gradients in the reduce dtype
  int optimizer = 1;   ///< O: master parameters and optimizer state

  bool operator==(const Degrees&) const = default;
};

/// "2, 4, 8" as "P=2 G=4 O=8".
std::string to_string(const Degrees& degrees);

/// Every valid triple for `ranks` ranks, in ascending order of (P, G, O). 10 for 4 ranks.
std::vector<Degrees> all_degrees(int ranks);

/// What degrees that were asked for come to where only `ranks` of the job's share the state, which divide them (an
/// expert's N / E): each becomes its greatest common divisor with `ranks`. So they divide each other and `ranks` again,
/// degrees that divide `ranks` stay, and "all" stays "all".
Degrees limited(const Degrees& degrees, int ranks);

/// Who owns which piece of a flat buffer: the ownership rule of docs/design.md, and nothing else. Immutable, cheap to
/// copy.
///
/// A flat buffer is cut in O equal chunks. For state rank r (mixed radix, innermost P):
///   p = r mod P;  g = (r mod G) / P;  o = (r mod O) / G;  chunk(r) = (p * G/P + g) * O/G + o.
/// Each of the P parameter pieces is a contiguous run of gradient pieces, each of those a contiguous run of chunks.
/// Every function that returns a group lists its members by the piece that they own, so that member i of a collective
/// works on the i-th slice of contiguous memory. Its ranks are the N that shard state (axes::state), by their index.
class Layout {
 public:
  /// Throws InvalidArgument, naming the nearest valid triples, unless P | G | O | ranks and ranks > 0.
  Layout(int ranks, Degrees degrees);

  int ranks() const { return ranks_; }                          ///< N: how many ranks shard the state
  const Degrees& degrees() const { return degrees_; }           ///< P, G and O
  int replicas() const { return ranks_ / degrees_.optimizer; }  ///< N / O: how many ranks own the same chunk

  int parameter_piece(int rank) const;  ///< in [0, P)
  int gradient_piece(int rank) const;   ///< in [0, G)
  int chunk(int rank) const;            ///< in [0, O)
  int replica(int rank) const;          ///< in [0, N/O)
  /// The rank that owns `chunk` in `replica`: the inverse of the two above.
  int owner(int chunk, int replica) const;

  /// The P ranks that together hold all parameter pieces: all-gather of parameters.
  std::vector<int> parameter_group(int rank) const;
  /// The G ranks over which whole gradients are reduce-scattered (first hop).
  std::vector<int> gradient_group(int rank) const;
  /// The O/G ranks that own the chunks of one gradient piece (second hop).
  std::vector<int> optimizer_group(int rank) const;
  /// The N/O ranks that own the same chunk (third hop: sum over replicas).
  std::vector<int> replica_group(int rank) const;
  /// The O/P ranks that own the chunks of one parameter piece: refresh of parameters after the optimizer step.
  std::vector<int> refresh_group(int rank) const;

  /// Elements of one chunk when `elements` are laid out: ceil(elements / O) rounded up to `alignment` elements.
  /// The padded buffer has O times as many.
  int64_t chunk_elements(int64_t elements, int64_t alignment) const;

  bool operator==(const Layout&) const = default;

 private:
  int ranks_;
  Degrees degrees_;
};

}  // namespace tesserae::mesh
