// Package kubeobject turns Kubernetes API objects into model facts. Every
// source uses it, so that a Service means the same whether an API server sent
// it or a person wrote it in a file.
//
// The functions are pure and share one contract. The object that comes back is
//
//   - nil without a problem, when there is nothing in it for a proxy (a headless
//     Service, say);
//   - nil with problems, when a field makes it unusable: the whole object is
//     refused, since serving half of a Service surprises more than serving its
//     last good state;
//   - non-nil, with problems for what was left out of it, if anything.
//
// Defaults that an API server fills in are filled in here too: a file has not
// been through one.
package kubeobject

import (
	"fmt"
	"strings"
	"unicode"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"spillway.dev/spillway/internal/facts/model"
)

// headlessLabel marks Services, and the slices made from them, that ask for no
// proxy; kube-proxy does not even list them.
const headlessLabel = "service.kubernetes.io/headless"

// checker gathers the problems of one object.
type checker struct {
	object   model.ObjectRef
	where    string
	problems []model.Problem
	invalid  bool
}

// invalidf reports a field that makes the whole object unusable.
func (c *checker) invalidf(p *field.Path, format string, args ...any) {
	c.invalid = true
	c.notef(p, format, args...)
}

// notef reports a field that is left out; the rest of the object stands.
func (c *checker) notef(p *field.Path, format string, args ...any) {
	c.report(p.String(), fmt.Sprintf(format, args...))
}

// maxProblems bounds the reports about one object. An object may have tens of
// thousands of fields, and the first few say as much as all of them.
const maxProblems = 16

// report adds a problem as one line, whatever the object's names and values hold.
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

// atMost refuses a list of n entries if that is more than most.
func (c *checker) atMost(at *field.Path, n, most int) {
	if n > most {
		c.invalidf(at, "has %d entries; the maximum is %d", n, most)
	}
}

// Printable replaces what would break a line or steer a terminal. Names and values
// are whatever their author wrote.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}

// clip keeps a report to one readable line, however long the value that it
// quotes.
func clip(s string) string {
	const most = 400
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most/2], "") + " ... " + strings.ToValidUTF8(s[len(s)-most/2:], "")
}

// Namespaced returns the name of an object that lives in a namespace; a file
// that names none means "default".
func Namespaced(m *metav1.ObjectMeta) model.Name {
	n := model.Name{Namespace: m.Namespace, Name: m.Name}
	if n.Namespace == "" {
		n.Namespace = metav1.NamespaceDefault
	}
	return n
}

// newChecker starts the check of a namespaced object with its metadata.
func newChecker(kind string, m *metav1.ObjectMeta) (*checker, model.Name) {
	name := Namespaced(m)
	c := &checker{object: model.ObjectRef{Kind: kind, Name: name}, where: kind + " " + name.String()}
	c.checkName(m.Name)
	if errs := validation.IsDNS1123Label(name.Namespace); len(errs) > 0 {
		c.invalidf(field.NewPath("metadata", "namespace"), "%q is not a namespace name: %s", m.Namespace, strings.Join(errs, "; "))
	}
	return c, name
}

// newClusterChecker starts the check of an object without a namespace.
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

// oneOf checks an enumeration: "" stands for the first of the values, which is
// the API's default.
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

// port checks a port number that must be there.
func (c *checker) port(p *field.Path, value int32) uint16 {
	if value < 1 || value > 65535 {
		c.invalidf(p, "%d is not a port; use 1 to 65535", value)
		return 0
	}
	return uint16(value)
}

// optionalPort checks a port number of which 0 means none.
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
