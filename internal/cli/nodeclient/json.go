package nodeclient

import (
	"bytes"
	"encoding/json"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// JSON encodes a message with all its fields, in the style of all commands. It differs from the JSON of
// the agent's API in two things: 64-bit integers are numbers, and values of enums are as flags have
// them: "tcp", "closed", "unspecified".
func JSON(m proto.Message) ([]byte, error) { return object(m.ProtoReflect()) }

// object encodes a message. Fields without a value are those that the API leaves out, too.
func object(m protoreflect.Message) ([]byte, error) {
	fields := m.Descriptor().Fields()
	if m.Descriptor().FullName().Parent() == "google.protobuf" { // a time or a duration
		return protojson.Marshal(m.Interface())
	}
	var out bytes.Buffer
	for i := range fields.Len() {
		f := fields.Get(i)
		text, err := field(m, f)
		if err != nil {
			return nil, err
		}
		if text == nil {
			continue
		}
		if out.Len() > 0 {
			out.WriteByte(',')
		}
		out.WriteString(`"` + f.JSONName() + `":`)
		out.Write(text)
	}
	return []byte("{" + out.String() + "}"), nil
}

// field encodes the value of a field; nil for one to leave out.
func field(m protoreflect.Message, f protoreflect.FieldDescriptor) ([]byte, error) {
	switch v := m.Get(f); {
	case f.IsList():
		texts := make([][]byte, v.List().Len())
		for i := range texts {
			var err error
			if texts[i], err = value(f, v.List().Get(i)); err != nil {
				return nil, err
			}
		}
		return []byte("[" + string(bytes.Join(texts, []byte(","))) + "]"), nil
	case f.Message() != nil && !m.Has(f):
		return []byte("null"), nil
	case f.HasPresence() && !m.Has(f):
		return nil, nil
	default:
		return value(f, v)
	}
}

func value(f protoreflect.FieldDescriptor, v protoreflect.Value) ([]byte, error) {
	switch {
	case f.Message() != nil:
		return object(v.Message())
	case f.Enum() != nil:
		if e := f.Enum().Values().ByNumber(v.Enum()); e != nil {
			return json.Marshal(enumName(f.Enum(), e))
		}
		return json.Marshal(v.Enum()) // of a newer agent
	}
	return json.Marshal(v.Interface())
}

// enumName is the name of a value without that of its enum: "tcp" of PROTOCOL_TCP.
func enumName(e protoreflect.EnumDescriptor, v protoreflect.EnumValueDescriptor) string {
	prefix := strings.TrimSuffix(string(e.Values().ByNumber(0).Name()), "UNSPECIFIED")
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), prefix))
}
