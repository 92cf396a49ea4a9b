// Package observe holds what shows a running agent to others. It only reads: nothing in this
// group decides, writes to the kernel, or delays those that do.
//
//	flowlog  the last flow events, with names, for readers
//	otlp     flow events and metrics for an OpenTelemetry collector
//	server   the API of the agent (api/proto): gRPC, gRPC-Web and JSON
//	web      the page of `spillway ui`, and its way to the agents
//
// The state comes from reconcile, which answers questions between two turns, and from the
// dataplanes (dataplane.Inspector), which read the kernel.
package observe
