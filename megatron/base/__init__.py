"""Ground floor: standard library only. Formulas, configs, atomic files, collected complaints."""
