package dataplane

import (
	"context"
	"net/netip"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// Comparer is a Backend that compares what it has written with the kernel. Any goroutine may
// call Differences, which changes nothing and may wait for a write.
type Comparer interface {
	Backend

	// Differences compares a Service port with the kernel. Each text is one difference from
	// the last write of the port, at most limit of them.
	Differences(ctx context.Context, id intent.PortID, limit int) ([]string, error)
}

// Inspector is a Backend that describes its objects in the kernel. Any goroutine may call
// its methods, also during a write, and none of them changes anything.
type Inspector interface {
	Comparer

	// Tables returns the tables of the kernel that have a limit.
	Tables() []Table
	// Hooks returns the places where programs are attached, or should be.
	Hooks() []Hook
	// Features returns the optional properties of the kernel.
	Features() []Feature
	// Drops returns the packets and socket calls that were refused or dropped.
	Drops() []Drop
	// Flows calls each with the flows of the table, in no order, until it returns false.
	Flows(ctx context.Context, each func(Flow) bool) error
}

// Table is a table of the kernel with a limit, in entries.
type Table struct {
	Name       string
	Used, Size uint64
}

// Hook is a place in the kernel for a program.
type Hook struct {
	Place     string // device and direction, or cgroup
	Program   string
	Mechanism string
	Err       error // why it is not attached; nil if it is
}

// Feature is an optional property of the kernel.
type Feature struct {
	Name    string
	Present bool
	Detail  string // what it is for
}

// Drop counts packets or socket calls since the programs were loaded.
type Drop struct {
	Reason  string // the verdict
	Meaning string
	Packets uint64
}

// Flow is one connection or datagram exchange in the flow table.
type Flow struct {
	Protocol                  model.Protocol
	Client, Service, Endpoint netip.AddrPort
	State                     string
	// Refused says that the endpoint answered the first segment of a TCP connection with an RST.
	Refused  bool
	Reset    bool      // an RST has closed it
	Opened   time.Time // zero: unknown
	LastSeen time.Time // to a second
	// DSR says that the endpoint's node answers the client itself, and OneWay that this is
	// the node that received the connection: no reply passes it.
	DSR, OneWay bool
	// Egress says that it is a Pod's own connection to the outside, at Endpoint, which sees Source: an
	// address and a port of the node. Source is set for such flows alone.
	Egress bool
	Source netip.AddrPort
}
