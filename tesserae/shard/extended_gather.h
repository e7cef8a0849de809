#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/group.h"
#include "tesserae/shard/flat.h"
#include "tesserae/shard/gather_extension.h"

namespace tesserae::shard {

/// The gathers of one parameter that extends them. Tensors that it has made stay: autograd saves them in forward and
/// reads them in backward. What comes and goes is the memory of their storages; to read them without is an error.
class ExtendedGather {
 public:
  /// `group`: of the ranks that share the rows out, in their order. `flat`: of the parameter alone; it outlives this.
  ExtendedGather(std::shared_ptr<GatherExtension> extension, comm::Group& group, const Flat& flat);
  ~ExtendedGather();
  ExtendedGather(const ExtendedGather&) = delete;
  ExtendedGather& operator=(const ExtendedGather&) = delete;

  /// Takes what this rank brings. Throws InvalidArgument for inputs of other sizes or dtypes than those of before.
  void begin();
  /// On the gather lane: what this rank brings is written where it travels from, its piece of each of these buffers,
  /// which group() is to gather.
  const std::vector<at::Tensor>& write_inputs();
  comm::Group& group() const { return group_; }
  /// After that.
  void finish();
  void free();

 private:
  /// A storage that has memory only while the parameter is gathered.
  struct Room {
    c10::Storage storage;
    size_t bytes;
  };
  void make_outputs();
  void require_same() const;
  const std::string& name() const { return flat_.slots().front().names.front(); }
  void add_room(const at::Tensor& tensor);

  std::shared_ptr<GatherExtension> extension_;
  comm::Group& group_;
  const Flat& flat_;
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> buffers_;  // for each input: [members x elements]
  std::vector<at::Tensor> outputs_;  // the same as the extension sees it
  std::vector<Room> rooms_;
  bool made_ = false;
};

}  // namespace tesserae::shard
