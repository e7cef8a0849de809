#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "tesserae/comm/lane.h"
#include "tesserae/shard/compute_storage.h"
#include "tesserae/shard/extended_gather.h"
#include "tesserae/shard/flat.h"
#include "tesserae/shard/sharding.h"

namespace tesserae::shard {

/// The parameter side of one flat buffer on this rank: its pieces, and the gathered copy while there is one.
///
/// [Note: version] begin_publish() raises the version of the pieces; a gathered copy remembers which version it shows.
/// A copy that is not the newest counts as not gathered, whatever the lifetime says, so no code has to know who made it
/// stale.
///
/// [Note: shared copy] Where the ranks of P share memory (Group::share), there is one gathered copy for all of them,
/// for good: pieces, and masters of the same dtype, lie in it. Gathering moves nothing:
///  1. between steps each rank writes its own piece (optimizer, refresh), or casts it there when it starts to gather;
///  2. finish_gather() returns when all ranks have come to that version: then everybody reads;
///  3. Engine::finish_reading(), after a backward at a boundary or an evaluation, returns when all ranks have read:
///  back to 1.
///
/// [Note: rest] Between its forward and its backward a unit may rest sharded over fewer ranks than P: each keeps one
/// k-th of what was gathered, k neighbours of the group together all of it, and the next gather of that version is
/// among those alone. (ZeRO++ keeps such a copy for good; here rows stay in the order of ranks.)
class FlatParameter {
 public:
  /// `master`: this rank's chunk in the master dtype. `piece`: this rank's parameter piece in the compute dtype;
  /// undefined if the master takes its place (Flat::master_is_piece) in another dtype or on another device.
  FlatParameter(const UnitContext& context, const Flat& flat, ComputeStorage storage, at::Tensor master,
                at::Tensor piece);
  ~FlatParameter();
  FlatParameter(const FlatParameter&) = delete;
  FlatParameter& operator=(const FlatParameter&) = delete;

  /// What the module's parameters are views of, for the FlatParameter that replaces this one.
  ComputeStorage take_storage() { return std::move(storage_); }

  /// Memory for a copy that all ranks of P share, of this buffer cut as `flat`: [flat.total()], compute dtype, zeros.
  /// Undefined if P is 1, if the parameter or the user decides what a gather gives, or if there is no such memory.
  /// Collective.
  at::Tensor shared_memory(const Flat& flat) const;
  /// Whether there would be such memory with `next`, unless there is none left. No collective.
  bool would_share(const UnitContext& next, const Flat& flat) const;
  /// What begin_gather() of such a buffer would ask of the pool: buffer_bytes() before it is made.
  int64_t planned_bytes(const UnitContext& next, const Flat& flat) const;
  /// What is gathered lies in `whole`, which is such memory, from now on. A piece that does not lie there yet moves
  /// there; tensors that show it keep doing so. Before the first gather; does nothing if `whole` is undefined.
  void share(at::Tensor whole);

  /// The parameter decides itself what travels, and what is computed with; before the first gather. Of row-cut buffers
  /// only. Throws InvalidArgument unless P is O or 1.
  void extend(std::shared_ptr<GatherExtension> extension);
  bool extended() const { return extended_ != nullptr; }

  /// A gather of the newest version over P begins, unless it is gathered or on its way: true if something has to
  /// travel, by gather(). Never waits.
  bool begin_gather();
  /// Those whose gather has begun travel together, in one task of the gather lane. Never waits.
  static void gather(const std::vector<FlatParameter*>& all, const UnitContext& context, const comm::Label& label);
  /// Waits until the newest version can be read through the module's parameters. begin_gather() came before.
  void finish_gather();
  /// Gives the gathered copy up. Does nothing for parameters that are always whole (P = 1, and no
  /// cast). `keep`: Pool::release().
  void free(bool keep = true);
  /// Before that: keeps this rank's part of what `group` will gather again, if nothing is published until then.
  void rest(comm::Group& group);
  /// True from begin_gather() to free(): the copy takes a buffer of the pool, or stands for one.
  bool holds_buffer() const { return held_; }
  bool shared() const { return shared_; }
  /// True from begin_gather() to finish_gather().
  bool arriving() const { return held_ && !arrived_ && shown_version_ == version_; }
  /// True if finish_gather() has been called for the newest version.
  bool readable() const { return resident_ || (held_ && arrived_ && shown_version_ == version_); }

  /// Throws InvalidArgument for one of `parameters` (by slot) to which somebody gave other data.
  void require_views(const std::vector<at::Tensor>& parameters) const;

  /// The master gets another dtype, that of the flat buffer; its values are cast. Before the first gather only.
  void cast_master();
  /// The master changed: raises the version. True if the piece has to be refreshed from the owners of its chunks (O to
  /// P), by refresh().
  bool begin_publish();
  /// Those of which that is so, in one task of the gather lane. Never waits.
  static void refresh(const std::vector<FlatParameter*>& all, const UnitContext& context, const comm::Label& label);
  /// The newest version can be read once that task has run, and finish_gather() has waited for it.
  void refreshes_with(const comm::Ticket& ticket);

  /// What this rank holds of the values that count between steps, its chunk of the master, and where that lies in the
  /// flat buffer.
  const at::Tensor& local() const { return master_; }
  mesh::Range local_range() const { return flat_.chunk_range(); }

  /// [flat.total()], in memory of its own: every rank's `local` (of local()'s size, any dtype). Collective; waits.
  at::Tensor whole_values(const at::Tensor& local);
  /// Takes local_range() of such a buffer as this rank's new values. Then ShardedUnit::publish().
  void set_values(const at::Tensor& whole);

  const Flat& flat() const { return flat_; }
  int64_t buffer_bytes() const;  ///< what begin_gather() asks of the pool; 0 if it never does
  int64_t state_bytes() const;   ///< pieces that are not the master

 private:
  bool may_share(const UnitContext& context, const Flat& flat) const;
  void show(at::Tensor whole);
  // On the gather lane. What the user's code throws goes to `failure`.
  static void carry(const std::vector<FlatParameter*>& all, const Sharding& sharding, const comm::Label& label,
                    UserCollective* gatherer, std::exception_ptr& failure);
  void write_piece();
  const at::Tensor& write_chunk();

  const UnitContext& context_;
  std::shared_ptr<const Sharding> sharding_;
  const Flat& flat_;
  at::Tensor master_;
  at::Tensor piece_;     // may be the master's memory
  bool resident_;        // the piece is the whole buffer, in memory for good: nothing to gather
  bool shared_ = false;  // whole_ is the copy for all ranks
  ComputeStorage storage_;
  std::unique_ptr<ExtendedGather> extended_;
  bool held_ = false;
  bool arrived_ = false;  // finish_gather() has been called for what is held
  Pool::Buffer buffer_ = -1;
  Pool::Buffer viewed_ = -1;  // the buffer that whole_ and own_ show: addresses are stable, so views are made once
  at::Tensor whole_;
  at::Tensor own_;  // this rank's piece of whole_
  int64_t version_ = 0;
  int64_t shown_version_ = -1;
  int64_t met_version_ = -1;  // shared: the last one that the ranks have come to together
  at::Tensor rest_;           // this rank's part of whole_, of rest_version_
  int64_t rest_version_ = -1;
  comm::Group* rest_group_ = nullptr;
  bool from_rest_ = false;  // the gather that is on its way begins there
  std::shared_ptr<std::exception_ptr> failure_;
  comm::Ticket gather_;
  comm::Ticket refresh_;
};

}  // namespace tesserae::shard
