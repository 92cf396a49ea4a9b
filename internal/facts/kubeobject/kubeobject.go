// Package kubeobject converts Kubernetes API objects to model facts. Every source uses
// it, so that a Service from an API server means the same as a Service from a file.
//
// The functions are pure and share one contract. The returned object is
//
//   - nil without a problem, if the object has nothing for a proxy, such as a
//     headless Service;
//   - nil with problems, if a field makes the whole object unusable: half of a
//     Service is more surprising than its last good state;
//   - non-nil, with problems for the parts that were left out, if any.
//
// The functions also fill in the API server's defaults, because files bypass it.
package kubeobject

import (
	"fmt"
	"strings"
	"unicode"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"spillway.dev/spillway/internal/facts/model"
)

// headlessLabel marks Services, and their slices, that need no proxy. kube-proxy does not
// list them.
const headlessLabel = "service.kubernetes.io/headless"

// ReadsAnnotation reports whether a Service's or an EndpointSlice's annotation of this name is read.
func ReadsAnnotation(key string) bool {
	return strings.HasPrefix(key, model.AnnotationPrefix) || key == sourceRangesAnnotation ||
		key == corev1.EndpointsLastChangeTriggerTime
}

// ReadsLabel reports whether a Service's or an EndpointSlice's label of this name is read.
func ReadsLabel(key string) bool {
	return key == proxyNameLabel || key == headlessLabel || key == discoveryv1.LabelServiceName
}

// checker collects the problems of one object.
type checker struct {
	object   model.ObjectRef
	where    string
	problems []model.Problem
	invalid  bool
	part     string // that leaveOut checks, "" for none
}

// invalidf reports a field that makes the whole object unusable, or the part of it that
// leaveOut checks.
func (c *checker) invalidf(p *field.Path, format string, args ...any) {
	c.invalid = true
	if c.part != "" {
		format = "the " + c.part + " is left out: " + format
	}
	c.notef(p, format, args...)
}

// notef reports a field that is ignored; the rest of the object is valid.
func (c *checker) notef(p *field.Path, format string, args ...any) {
	c.report(p.String(), fmt.Sprintf(format, args...))
}

// leaveOut runs the checks of a part of the object, such as a port of a list, and reports
// whether the part is left out: an error costs the part, not the whole object.
func (c *checker) leaveOut(part string, check func()) bool {
	invalid := c.invalid
	c.part, c.invalid = part, false
	check()
	left := c.invalid
	c.part, c.invalid = "", invalid
	return left
}

// maxProblems limits the reports about one object. An object may have tens of thousands
// of fields, and the first few reports are enough.
const maxProblems = 16

// report adds a problem as one line, whatever text the object's names and values contain.
func (c *checker) report(at, what string) {
	switch n := len(c.problems); {
	case n > maxProblems:
		return
	case n == maxProblems:
		at, what = "", fmt.Sprintf("has more problems than these %d; fix these first", maxProblems)
	}
	c.problems = append(c.problems, model.Problem{
		Object: c.object, Where: clip(Printable(c.where)), Field: clip(Printable(at)), What: clip(Printable(what)),
	})
}

// atMost refuses a list of n entries if n is larger than most.
func (c *checker) atMost(at *field.Path, n, most int) {
	if n > most {
		c.invalidf(at, "has %d entries; the maximum is %d", n, most)
	}
}

// Printable replaces characters that would break a line or control a terminal. Names and
// values may contain any text.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}

// clip shortens a report to one readable line, however long the quoted value is.
func clip(s string) string {
	const most = 400
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most/2], "") + " ... " + strings.ToValidUTF8(s[len(s)-most/2:], "")
}

// namespaced returns the name of a namespaced object. A file without a namespace means
// "default".
func namespaced(m *metav1.ObjectMeta) model.Name {
	n := model.Name{Namespace: shared(m.Namespace), Name: m.Name}
	if n.Namespace == "" {
		n.Namespace = metav1.NamespaceDefault
	}
	return n
}

// shared returns s, in memory that others of the same text share. It is for names that
// thousands of objects repeat, such as those of nodes.
func shared(s string) string { return unique.Make(s).Value() }

// newChecker returns a checker of a namespaced object, and checks its metadata.
func newChecker(kind string, m *metav1.ObjectMeta) (*checker, model.Name) {
	name := namespaced(m)
	c := &checker{object: model.ObjectRef{Kind: kind, Name: name}, where: kind + " " + name.String()}
	c.checkName(m.Name)
	if errs := validation.IsDNS1123Label(name.Namespace); len(errs) > 0 {
		c.invalidf(field.NewPath("metadata", "namespace"), "%q is not a namespace name: %s", m.Namespace, strings.Join(errs, "; "))
	}
	return c, name
}

// newClusterChecker returns a checker of an object without a namespace.
func newClusterChecker(kind, name string) *checker {
	return &checker{object: model.ObjectRef{Kind: kind, Name: model.Name{Name: name}}, where: kind + " " + name}
}

func (c *checker) checkName(name string) {
	p := field.NewPath("metadata", "name")
	if name == "" {
		c.invalidf(p, "is missing; give the object a name")
	} else if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 {
		c.invalidf(p, "%q is not an object name: %s", name, strings.Join(errs, "; "))
	}
}

// oneOf checks an enumeration. "" means the first of the values, which is the API's
// default.
func (c *checker) oneOf(p *field.Path, value string, values ...string) string {
	if value == "" {
		return values[0]
	}
	for _, v := range values {
		if v == value {
			return v
		}
	}
	c.invalidf(p, "%q is unknown; use %s", value, strings.Join(values, ", "))
	return values[0]
}

// protocol checks a protocol; "" is TCP.
func (c *checker) protocol(p *field.Path, value string) model.Protocol {
	switch c.oneOf(p, value, "TCP", "UDP", "SCTP") {
	case "UDP":
		return model.UDP
	case "SCTP":
		return model.SCTP
	}
	return model.TCP
}

// port checks a required port number.
func (c *checker) port(p *field.Path, value int32) uint16 {
	if value < 1 || value > 65535 {
		c.invalidf(p, "%d is not a port; use 1 to 65535", value)
		return 0
	}
	return uint16(value)
}

// optionalPort checks a port number; 0 means none.
func (c *checker) optionalPort(p *field.Path, value int32) uint16 {
	if value == 0 {
		return 0
	}
	return c.port(p, value)
}

func deref[T any](v *T) T {
	if v == nil {
		var zero T
		return zero
	}
	return *v
}
