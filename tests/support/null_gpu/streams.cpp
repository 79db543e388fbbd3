// Streams, events, captures and graphs. Everything is done when it is submitted, so nothing is ever waited for;
// what a wait would be is counted, and what a capture forbids is refused as CUDA refuses it.
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"

namespace null_gpu {
namespace {

struct Event {
  unsigned flags;
  bool recorded = false;
  // The capture it was last recorded in; 0 for none.
  unsigned long long capture = 0;
  std::map<Stream*, long> after;
  double milliseconds = 0;
};

template <typename T>
std::set<T*>& living() {
  static auto* all = new std::set<T*>;
  return *all;
}

std::map<unsigned long long, Capture*>& captures() {
  static auto* all = new std::map<unsigned long long, Capture*>;
  return *all;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
unsigned long long last_capture = 0;

unsigned long this_thread() { return (unsigned long)syscall(SYS_gettid); }

Stream* default_stream() {
  static auto* stream = new Stream{0, cudaStreamDefault};
  return stream;
}

// The stream of a handle, nullptr for one that was destroyed or never made.
Stream* stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return default_stream();
  return living<Stream>().count((Stream*)handle) ? (Stream*)handle : nullptr;
}
Event* event_of(cudaEvent_t handle) { return living<Event>().count((Event*)handle) ? (Event*)handle : nullptr; }

#define GET(type, name, from, handle)             \
  NULL_GPU_LOCK;                                  \
  if (cudaError_t error = initialise()) return error; \
  type* name = from(handle);                      \
  if (!name) return fail(cudaErrorInvalidResourceHandle, std::string(__func__) + ": destroyed, or never made")

void invalidate(Capture* capture, const std::string& why) {
  if (capture->invalid) return;
  capture->invalid = true;
  fprintf(stderr, "[null GPU] a capture is invalidated by %s\n", why.c_str());
}

// What happens to a graph's node, now or when the graph is replayed.
cudaError_t perform(const Node& node, const char* prefix) {
  bool gone = (node.kind == Node::COPY || node.kind == Node::SET) && place_of(node.target, node.size) == Place::INVALID;
  gone = gone || (node.kind == Node::COPY && place_of(node.source, node.size) == Place::INVALID);
  if (gone) return fail(cudaErrorIllegalAddress, node.name + " of memory that was freed since its capture");
  count(prefix + node.name);
  if (node.kind == Node::COPY) copy_memory(node.target, node.source, node.size);
  if (node.kind == Node::SET) set_memory(node.target, node.value, node.size);
  if (node.kind == Node::HOST) node.function((void*)node.source);
  return cudaSuccess;
}

// A capture from a blocking stream. The default stream waits for such streams, which cannot be part of a capture.
Capture* blocking_capture() {
  for (auto& [id, capture] : captures())
    if (!(capture->origin->flags & cudaStreamNonBlocking)) return capture;
  return nullptr;
}

cudaError_t check_default_stream(Stream* stream, const char* call) {
  Capture* capture = stream == default_stream() ? blocking_capture() : nullptr;
  if (!capture) return cudaSuccess;
  invalidate(capture, std::string(call) + " on the default stream");
  return fail(cudaErrorStreamCaptureImplicit, call);
}

// A wait for a stream, a device or an event that something captured would have to answer.
cudaError_t refuse_wait(Capture* own, const char* call) {
  if (own) {
    invalidate(own, call);
    return fail(cudaErrorStreamCaptureUnsupported, call);
  }
  return forbidden_by_capture(call) ? fail(cudaErrorStreamCaptureUnsupported, call) : cudaSuccess;
}

// The same of an event: its state is known only while it was last recorded outside every capture.
cudaError_t refuse_event_wait(Event* event, const char* call) {
  if (event->capture) {
    auto found = captures().find(event->capture);
    if (found != captures().end()) invalidate(found->second, std::string(call) + " of an event recorded in it");
    return fail(cudaErrorCapturedEvent, call);
  }
  return forbidden_by_capture(call) ? fail(cudaErrorStreamCaptureUnsupported, call) : cudaSuccess;
}

}  // namespace

bool forbidden_by_capture(const char* call) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  for (auto& [id, capture] : captures()) {
    bool ours = capture->thread == this_thread();
    bool forbids = capture->mode == cudaStreamCaptureModeGlobal ? thread_mode == cudaStreamCaptureModeGlobal || ours
                                                                : capture->mode != cudaStreamCaptureModeRelaxed && ours;
    if (!forbids) continue;
    invalidate(capture, call);
    return true;
  }
  return false;
}

cudaError_t submit(cudaStream_t handle, const Node& node) {
  Stream* stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle, node.name + " on a stream that was destroyed");
  if (cudaError_t error = check_default_stream(stream, node.name.c_str())) return error;
  Capture* capture = stream->capture;
  if (!capture) return perform(node, "");
  if (capture->invalid) return fail(cudaErrorStreamCaptureInvalidated, node.name);
  if (node.kind == Node::COPY &&
      (place_of(node.target, 1) == Place::PAGEABLE || place_of(node.source, 1) == Place::PAGEABLE)) {
    invalidate(capture, node.name);
    return fail(cudaErrorStreamCaptureUnsupported, node.name);
  }
  capture->graph.nodes.push_back(node);
  stream->after[stream]++;
  return cudaSuccess;
}

}  // namespace null_gpu

using namespace null_gpu;

extern "C" {

// ---- streams
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  auto* stream = new Stream{priority, flags};
  living<Stream>().insert(stream);
  *handle = (cudaStream_t)stream;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  GET(Stream, stream, stream_of, handle);
  if (stream->capture) {
    invalidate(stream->capture, "cudaStreamDestroy");
    stream->capture->streams.erase(stream);
  }
  // Kept in memory, since events may name it.
  living<Stream>().erase(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  GET(Stream, stream, stream_of, handle);
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  GET(Stream, stream, stream_of, handle);
  if (cudaError_t error = refuse_wait(stream->capture, "cudaStreamSynchronize")) return error;
  count("wait for a stream");
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  GET(Stream, stream, stream_of, handle);
  return refuse_wait(stream->capture, "cudaStreamQuery");
}
cudaError_t cudaDeviceSynchronize() {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  if (cudaError_t error = refuse_wait(nullptr, "cudaDeviceSynchronize")) return error;
  count("wait for the device");
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  NULL_GPU_LOCK;
  Node node{Node::HOST, "function of the host"};
  node.function = function, node.source = data;
  return submit(stream, node);
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void* data, unsigned) {
  GET(Stream, stream, stream_of, handle);
  if (cudaError_t error = refuse_wait(stream->capture, "cudaStreamAddCallback")) return error;
  callback(handle, cudaSuccess, data);
  return cudaSuccess;
}

// ---- events
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  auto* event = new Event{flags};
  living<Event>().insert(event);
  *handle = (cudaEvent_t)event;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  GET(Event, event, event_of, handle);
  living<Event>().erase(event);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  GET(Event, event, event_of, handle);
  Stream* stream = stream_of(stream_handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle, "cudaEventRecord on a stream that was destroyed");
  if (cudaError_t error = check_default_stream(stream, "cudaEventRecord")) return error;
  if (stream->capture && stream->capture->invalid) return fail(cudaErrorStreamCaptureInvalidated, "cudaEventRecord");
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  event->recorded = true;
  event->capture = stream->capture ? stream->capture->id : 0;
  event->after = stream->after;
  event->milliseconds = now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  GET(Event, event, event_of, handle);
  return refuse_event_wait(event, "cudaEventQuery");
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  GET(Event, event, event_of, handle);
  if (cudaError_t error = refuse_event_wait(event, "cudaEventSynchronize")) return error;
  count("wait for an event");
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
  NULL_GPU_LOCK;
  Event *start = event_of(first), *end = event_of(second);
  if (!start || !end || !start->recorded || !end->recorded || (start->flags | end->flags) & cudaEventDisableTiming)
    return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime of events that took no time");
  if (start->capture || end->capture) return fail(cudaErrorCapturedEvent, "cudaEventElapsedTime");
  *milliseconds = (float)(end->milliseconds - start->milliseconds);
  if (*milliseconds <= 0) *milliseconds = 1e-3f;  // nothing on a GPU takes no time
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
  GET(Stream, stream, stream_of, handle);
  Event* event = event_of(event_handle);
  if (!event) return fail(cudaErrorInvalidResourceHandle, "cudaStreamWaitEvent: the event was destroyed");
  if (!event->recorded) return cudaSuccess;
  if (stream->capture && stream->capture->invalid)
    return fail(cudaErrorStreamCaptureInvalidated, "cudaStreamWaitEvent");
  if (!event->capture) {
    if (!stream->capture || flags & cudaEventWaitExternal) return cudaSuccess;
    invalidate(stream->capture, "a wait for an event from outside");
    return fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  }
  auto found = captures().find(event->capture);
  if (found == captures().end()) return fail(cudaErrorCapturedEvent, "cudaStreamWaitEvent after the event's capture");
  Capture* capture = found->second;
  if (stream == default_stream()) {
    invalidate(capture, "a wait of the default stream for its event");
    return fail(cudaErrorStreamCaptureImplicit, "cudaStreamWaitEvent");
  }
  if (stream->capture && stream->capture != capture) {
    invalidate(capture, "a wait of another capture");
    invalidate(stream->capture, "a wait for another capture");
    return fail(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent");
  }
  if (!stream->capture) {
    stream->capture = capture;
    stream->after.clear();
    capture->streams.insert(stream);
  }
  for (auto& [other, operations] : event->after)
    if (stream->after[other] < operations) stream->after[other] = operations;
  return cudaSuccess;
}

// ---- captures
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(thread_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  GET(Stream, stream, stream_of, handle);
  if (stream == default_stream())
    return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture of the default stream");
  if (stream->capture) return fail(cudaErrorIllegalState, "cudaStreamBeginCapture: captured already");
  auto* capture = new Capture{++last_capture, stream, mode, this_thread(), {stream}};
  captures()[capture->id] = capture;
  stream->capture = capture;
  stream->after.clear();
  count("capture");
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  GET(Stream, stream, stream_of, handle);
  Capture* capture = stream->capture;
  *graph = nullptr;
  if (!capture) return fail(cudaErrorIllegalState, "cudaStreamEndCapture: not captured");
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != this_thread()) {
    invalidate(capture, "its end in another thread");
    return fail(cudaErrorStreamCaptureWrongThread, "cudaStreamEndCapture");
  }
  if (capture->origin != stream) {
    invalidate(capture, "its end on a stream that did not begin it");
    return fail(cudaErrorStreamCaptureUnmatched, "cudaStreamEndCapture");
  }
  bool unjoined = false;
  for (Stream* other : capture->streams) {
    unjoined = unjoined || stream->after[other] < other->after[other];
    other->capture = nullptr;
  }
  captures().erase(capture->id);
  bool invalid = capture->invalid;
  auto* captured = new Graph(std::move(capture->graph));
  delete capture;
  if (invalid || unjoined) {
    delete captured;
    return fail(invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture");
  }
  living<Graph>().insert(captured);
  *graph = (cudaGraph_t)captured;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  GET(Stream, stream, stream_of, handle);
  // The one use of the default stream that a capture survives.
  if (stream == default_stream() && blocking_capture())
    return fail(cudaErrorStreamCaptureImplicit, "cudaStreamIsCapturing");
  Capture* capture = stream->capture;
  *status = !capture           ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* num_nodes) {
  GET(Stream, stream, stream_of, handle);
  Capture* capture = stream->capture;
  if (id) *id = capture ? capture->id : 0;
  // No one adds nodes to a graph that is being captured, so it is named and not shown.
  if (graph) *graph = capture ? (cudaGraph_t)&capture->graph : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (num_nodes) *num_nodes = 0;
  return cudaStreamIsCapturing(handle, status);
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                unsigned) {
  return cudaSuccess;
}

// ---- graphs
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* handle, cudaGraph_t graph, unsigned long long) {
  NULL_GPU_LOCK;
  if (!living<Graph>().count((Graph*)graph)) return fail(cudaErrorInvalidValue, "cudaGraphInstantiate");
  auto* executable = new Graph(*(Graph*)graph);
  living<Graph>().insert(executable);
  *handle = (cudaGraphExec_t)executable;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  GET(Stream, stream, stream_of, stream_handle);
  auto* graph = (Graph*)handle;
  if (!living<Graph>().count(graph)) return fail(cudaErrorInvalidValue, "cudaGraphLaunch: destroyed");
  if (cudaError_t error = check_default_stream(stream, "cudaGraphLaunch")) return error;
  if (!stream->capture) count("launch of a graph");
  for (const Node& node : graph->nodes) {
    cudaError_t error = stream->capture ? submit(stream_handle, node) : perform(node, "in a graph: ");
    if (error) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* num_nodes) {
  NULL_GPU_LOCK;
  auto* graph = (Graph*)handle;
  for (size_t i = 0; nodes && i < *num_nodes && i < graph->nodes.size(); i++)
    nodes[i] = (cudaGraphNode_t)&graph->nodes[i];
  *num_nodes = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  NULL_GPU_LOCK;
  if (!living<Graph>().erase((Graph*)handle)) return fail(cudaErrorInvalidValue, "cudaGraphDestroy");
  delete (Graph*)handle;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) { return cudaGraphDestroy((cudaGraph_t)handle); }

// What a graph keeps alive is kept by its caller too.
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
  *object = (cudaUserObject_t)1;
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }

}  // extern "C"
