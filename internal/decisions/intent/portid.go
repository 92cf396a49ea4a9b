package intent

import (
	"cmp"
	"fmt"
)

// String returns "namespace/name:port/PROTO/family", with the port's name if it
// has one and its number otherwise.
func (id PortID) String() string {
	port := id.Port
	if port == "" {
		port = fmt.Sprint(id.Number)
	}
	return fmt.Sprintf("%s:%s/%s/%s", id.Service, port, id.Protocol, id.Family)
}

// Compare orders ids by namespace, name, port, number, protocol and family.
func (id PortID) Compare(o PortID) int {
	return cmp.Or(
		id.Service.Compare(o.Service),
		cmp.Compare(id.Port, o.Port),
		cmp.Compare(id.Number, o.Number),
		cmp.Compare(id.Protocol, o.Protocol),
		cmp.Compare(id.Family, o.Family),
	)
}
