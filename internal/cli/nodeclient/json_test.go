package nodeclient

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
)

// The JSON of commands is that of the API, but for numbers of 64 bits and for enums.
func TestJSON(t *testing.T) {
	count := uint64(1) << 60
	event := &nodev1alpha1.FlowEvent{Kind: nodev1alpha1.EventKind_EVENT_KIND_CLOSED, Time: timestamppb.New(time.Unix(1, 5)),
		Reason: "a\"\x1b\u202e", Flow: &nodev1alpha1.Flow{Protocol: nodev1alpha1.Protocol_PROTOCOL_TCP, BytesToClient: count,
			Handshake: durationpb.New(1234567), Client: &nodev1alpha1.Peer{Port: 80}}}
	for _, m := range []proto.Message{
		event, &nodev1alpha1.FlowEvent{}, &nodev1alpha1.StatusResponse{}, &nodev1alpha1.Egress{Connections: &count, Sources: []string{"a"}},
		&nodev1alpha1.Service{Ports: []*nodev1alpha1.ServicePort{{}, {Counters: &nodev1alpha1.Counters{HandshakeMsLog2: []uint64{1, 2}}}}},
	} {
		text, err := JSON(m)
		if err != nil {
			t.Fatal(err)
		}
		api, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		var got, want any
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		if err := json.Unmarshal(api, &want); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(styled("", want), got); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	}
	text, err := JSON(event)
	var got struct {
		Kind string
		Flow struct {
			Protocol      string
			BytesToClient uint64
		}
	}
	if err := json.Unmarshal(text, &got); err != nil || got.Kind != "closed" || got.Flow.Protocol != "tcp" || got.Flow.BytesToClient != count {
		t.Errorf("%+v, %v", got, err)
	}
	if err != nil {
		t.Error(err)
	}
}

// styled changes a value of the API's JSON to the style of commands.
func styled(key string, v any) any {
	names := map[any]any{"EVENT_KIND_CLOSED": "closed", "EVENT_KIND_UNSPECIFIED": "unspecified", "PROTOCOL_TCP": "tcp",
		"PROTOCOL_UNSPECIFIED": "unspecified"}
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = styled(k, v[k])
		}
	case []any:
		for i := range v {
			v[i] = styled(key, v[i])
		}
	case string:
		var number float64
		if names[v] != nil {
			return names[v]
		}
		if json.Unmarshal([]byte(v), &number) == nil {
			return number
		}
	}
	return v
}
