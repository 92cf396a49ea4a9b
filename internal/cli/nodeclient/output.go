package nodeclient

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
)

// NewerAgent is a line for people about an agent that sends more than this program knows; ""
// if it does not.
func NewerAgent(messages ...proto.Message) string {
	for _, m := range messages {
		if hasUnknown(m.ProtoReflect()) {
			return "the agent is newer than this program, which does not show everything"
		}
	}
	return ""
}

func hasUnknown(m protoreflect.Message) bool {
	if len(m.GetUnknown()) > 0 {
		return true
	}
	found := false
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Message() == nil || f.IsMap():
		case f.IsList():
			for i := range v.List().Len() {
				found = found || hasUnknown(v.List().Get(i).Message())
			}
		default:
			found = hasUnknown(v.Message())
		}
		return !found
	})
	return found
}

// Age returns the time from then to now, both by the node's clock, for people; "" if one of
// them is unknown.
func Age(now, then *timestamppb.Timestamp) string {
	if now == nil || then == nil {
		return ""
	}
	d := now.AsTime().Sub(then.AsTime())
	switch {
	case d < time.Second:
		return "0s"
	case d < time.Hour:
		return d.Truncate(time.Second).String()
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Truncate(time.Minute).String(), "0s")
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// Protocol returns the name of a protocol, as Kubernetes writes it.
func Protocol(p nodev1alpha1.Protocol) string {
	return strings.TrimPrefix(p.String(), "PROTOCOL_")
}

// ConntrackProtocol returns the name of a protocol, as conntrack writes it.
func ConntrackProtocol(p nodev1alpha1.Protocol) string { return strings.ToLower(Protocol(p)) }
