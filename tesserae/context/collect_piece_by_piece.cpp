// Keys and values straight from the rank that has them (ring attention, Liu et al., 2023, arXiv:2310.01889; here each
// piece takes one hop, so that ranks which do not attend to each other send nothing). C ranks, this one is r:
//  1. Block 0 is this rank's own. Before a block is handed out, the next is asked for: step i sends this rank's keys
//     and values to r + i and receives those of r - i (mod C), on the lane, while the block before is worked on.
//     Where all of them are in shared memory, they are read there, and nothing is sent.
//  2. Backward: the gradients of block i go back to r - i, and those of r + i come, on the lane, while the next is
//     worked on. They are added in the order of steps, each when the next is sent.
// All ranks submit the same steps in the same order: 1, 2, back 1, 3, back 2, ...

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <optional>
#include <utility>

#include "tesserae/context/key_values.h"
#include "tesserae/context/tiles.h"

namespace tesserae::context {
namespace {

class PieceByPiece : public KeyValues {
 public:
  PieceByPiece(const Sequence& sequence, const Pattern& pattern, const Pair& own, const Pair& whole)
      : sequence_(sequence),
        pattern_(pattern),
        own_(whole.keys.defined() ? at::Tensor() : at::stack({own.keys, own.values})),
        like_(own.keys),
        whole_(whole) {}

  int blocks() const override { return ranks(); }

  Block next() override {
    const int step = step_++;
    const std::vector<Span>& spans = sequence_.cut().spans(owner(step));
    if (whole_.keys.defined()) {
      if (!attends(sequence_.parallel().index(), owner(step)) && step > 0) return {};
      return {whole_, in_place(spans)};
    }
    const Transfer here = step == 0 ? Transfer{own_, {}, {}} : std::exchange(coming_, {});
    if (step + 1 < ranks()) coming_ = start(step + 1);
    here.ticket.wait();
    if (!here.data.defined()) return {};
    return {{here.data[0], here.data[1]}, end_to_end(spans)};
  }

  void add_gradients(const at::Tensor& both) override {
    const int step = step_ - 1;
    if (step == 0) {
      sums_ = both;
      return;
    }
    Transfer back = start_back(step, both);
    add(std::exchange(back_, std::move(back)));
  }

  Pair gradients() override {
    add(back_);
    return {sums_[0], sums_[1]};
  }

 private:
  struct Transfer {
    at::Tensor data;  // undefined: there is nothing to come
    comm::Ticket ticket;
    at::Tensor sent = {};  // kept until the ticket was waited for: a lane of a device still reads it
  };

  int ranks() const { return sequence_.parallel().size(); }
  int owner(int step) const { return (sequence_.parallel().index() - step + ranks()) % ranks(); }
  int reader(int step) const { return (sequence_.parallel().index() + step) % ranks(); }

  void add(const Transfer& transfer) {
    transfer.ticket.wait();
    if (transfer.data.defined()) sums_.add_(transfer.data);
  }

  bool attends(int queries, int keys) const {
    for (const Span& asking : sequence_.cut().spans(queries)) {
      for (const Span& asked : sequence_.cut().spans(keys)) {
        if (!tiles(pattern_, asking, asked).empty()) return true;
      }
    }
    return false;
  }

  at::Tensor room_for(int rank, c10::TensorOptions options) const {
    std::vector<int64_t> shape = like_.sizes().vec();
    shape[time_dim] = sequence_.cut().tokens(rank);
    shape.insert(shape.begin(), 2);
    return at::empty(shape, options);
  }

  /// Where `gone` is given, it goes to `to`; what comes is for this rank's `from`.
  Transfer exchange(int to, const at::Tensor& gone, int from, const at::Tensor& room) {
    std::vector<comm::Message> sends, receives;
    if (gone.defined()) sends.push_back({to, gone});
    if (room.defined()) receives.push_back({from, room});
    if (sends.empty() && receives.empty()) return {};
    comm::Group* const group = &sequence_.parallel().group();
    return {room, sequence_.parallel().lane().submit([group, sends, receives] { group->exchange(sends, receives); }),
            gone};
  }

  Transfer start(int step) {
    const int here = sequence_.parallel().index(), from = owner(step), to = reader(step);
    const at::Tensor room = attends(here, from) ? room_for(from, own_.options()) : at::Tensor();
    return exchange(to, attends(to, here) ? own_ : at::Tensor(), from, room);
  }

  Transfer start_back(int step, const at::Tensor& gradients) {
    const int here = sequence_.parallel().index(), from = reader(step);
    const at::Tensor room = attends(from, here) ? room_for(here, sums_.options()) : at::Tensor();
    return exchange(owner(step), gradients, from, room);
  }

  const Sequence& sequence_;
  const Pattern& pattern_;
  at::Tensor own_, like_, sums_;
  Pair whole_;
  Transfer coming_;  // the next block
  Transfer back_;    // gradients of this rank's positions
  int step_ = 0;
};

}  // namespace

std::unique_ptr<KeyValues> collect_piece_by_piece(const Sequence& sequence, const Pattern& pattern, const Pair& own,
                                                  const Pair& whole) {
  return std::make_unique<PieceByPiece>(sequence, pattern, own, whole);
}

}  // namespace tesserae::context
