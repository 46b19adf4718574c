; Generated from inlined.c by `make runtime`.
; 214f0b8d074b51820c1b2fd18cb918de691c9d352f5801ebc09b1d778dab9a19
%struct.die = type { i64, i64, i64, i64 }
define dso_local i64 @inlined_find(ptr %search, ptr %unit) #0 {
entry:
  %path = alloca [128 x %struct.die], align 16
  %0 = load ptr, ptr %search, align 8
  %call = call i32 %0(ptr %unit, ptr nonnull %path)
  br label %for.cond
for.cond:
  %at.0 = phi i64 [ 0, %entry ], [ %dec, %if.end ], [ %at.1, %if.end32 ]
  %end.0 = phi i32 [ %call, %entry ], [ %call5, %if.end ], [ %end.1, %if.end32 ]
  %arrayidx = getelementptr inbounds %struct.die, ptr %path, i64 %at.0
  %tobool.not = icmp eq i32 %end.0, 0
  br i1 %tobool.not, label %if.end6, label %if.then
if.then:
  %tobool1.not = icmp eq i64 %at.0, 0
  br i1 %tobool1.not, label %if.then2, label %if.end
if.then2:
  ret i64 0
if.end:
  %dec = add i64 %at.0, -1
  %sibling = getelementptr inbounds nuw i8, ptr %search, i64 8
  %1 = load ptr, ptr %sibling, align 8
  %arrayidx3 = getelementptr inbounds %struct.die, ptr %path, i64 %dec
  %arrayidx4 = getelementptr inbounds %struct.die, ptr %path, i64 %dec
  %call5 = call i32 %1(ptr nonnull %arrayidx3, ptr nonnull %arrayidx4)
  br label %for.cond
if.end6:
  %tag7 = getelementptr inbounds nuw i8, ptr %search, i64 16
  %2 = load ptr, ptr %tag7, align 8
  %call8 = call i32 %2(ptr nonnull %arrayidx)
  switch i32 %call8, label %if.else [
    i32 29, label %land.lhs.true
    i32 11, label %land.lhs.true23
    i32 46, label %land.lhs.true23
  ]
land.lhs.true:
  %name = getelementptr inbounds nuw i8, ptr %search, i64 24
  %3 = load ptr, ptr %name, align 8
  %call9 = call ptr %3(ptr nonnull %arrayidx)
  %wanted = getelementptr inbounds nuw i8, ptr %search, i64 32
  %4 = load ptr, ptr %wanted, align 8
  br label %for.cond.i
for.cond.i:
  %wanted.addr.i.0 = phi ptr [ %4, %land.lhs.true ], [ %incdec.ptr4.i, %if.end.i ]
  %name.addr.i.0 = phi ptr [ %call9, %land.lhs.true ], [ %incdec.ptr.i, %if.end.i ]
  %tobool.i.not = icmp eq ptr %name.addr.i.0, null
  br i1 %tobool.i.not, label %if.end18, label %land.rhs.i
land.rhs.i:
  %5 = load i8, ptr %name.addr.i.0, align 1
  %6 = load i8, ptr %wanted.addr.i.0, align 1
  %cmp.i = icmp eq i8 %5, %6
  br i1 %cmp.i, label %for.body.i, label %if.end18
for.body.i:
  %7 = load i8, ptr %name.addr.i.0, align 1
  %tobool3.i.not = icmp eq i8 %7, 0
  br i1 %tobool3.i.not, label %is_same.exit, label %if.end.i
if.end.i:
  %incdec.ptr.i = getelementptr inbounds nuw i8, ptr %name.addr.i.0, i64 1
  %incdec.ptr4.i = getelementptr inbounds nuw i8, ptr %wanted.addr.i.0, i64 1
  br label %for.cond.i
is_same.exit:
  br i1 %cmp.i, label %if.then11, label %if.end18
if.then11:
  %count = getelementptr inbounds nuw i8, ptr %search, i64 56
  %8 = load i64, ptr %count, align 8
  %room = getelementptr inbounds nuw i8, ptr %search, i64 48
  %9 = load i64, ptr %room, align 8
  %cmp12 = icmp ult i64 %8, %9
  br i1 %cmp12, label %if.then13, label %if.end16
if.then13:
  %found = getelementptr inbounds nuw i8, ptr %search, i64 40
  %10 = load ptr, ptr %found, align 8
  %count14 = getelementptr inbounds nuw i8, ptr %search, i64 56
  %11 = load i64, ptr %count14, align 8
  %arrayidx15 = getelementptr inbounds %struct.die, ptr %10, i64 %11
  %12 = load i64, ptr %arrayidx, align 8
  store i64 %12, ptr %arrayidx15, align 8
  %unit.i = getelementptr inbounds nuw i8, ptr %arrayidx, i64 8
  %13 = load i64, ptr %unit.i, align 8
  %unit2.i = getelementptr inbounds nuw i8, ptr %arrayidx15, i64 8
  store i64 %13, ptr %unit2.i, align 8
  %abbrev.i = getelementptr inbounds nuw i8, ptr %arrayidx, i64 16
  %14 = load i64, ptr %abbrev.i, align 8
  %abbrev3.i = getelementptr inbounds nuw i8, ptr %arrayidx15, i64 16
  store i64 %14, ptr %abbrev3.i, align 8
  %padding.i = getelementptr inbounds nuw i8, ptr %arrayidx, i64 24
  %15 = load i64, ptr %padding.i, align 8
  %padding4.i = getelementptr inbounds nuw i8, ptr %arrayidx15, i64 24
  store i64 %15, ptr %padding4.i, align 8
  br label %if.end16
if.end16:
  %count17 = getelementptr inbounds nuw i8, ptr %search, i64 56
  %16 = load i64, ptr %count17, align 8
  %inc = add i64 %16, 1
  store i64 %inc, ptr %count17, align 8
  br label %if.end18
if.end18:
  switch i32 %call8, label %if.else [
    i32 29, label %land.lhs.true23
    i32 11, label %land.lhs.true23
    i32 46, label %land.lhs.true23
  ]
land.lhs.true23:
  %add = add i64 %at.0, 1
  %cmp24 = icmp ult i64 %add, 128
  br i1 %cmp24, label %if.then25, label %if.else
if.then25:
  %17 = load ptr, ptr %search, align 8
  %inc27 = add i64 %at.0, 1
  %arrayidx28 = getelementptr inbounds %struct.die, ptr %path, i64 %inc27
  %call29 = call i32 %17(ptr nonnull %arrayidx, ptr nonnull %arrayidx28)
  br label %if.end32
if.else:
  %sibling30 = getelementptr inbounds nuw i8, ptr %search, i64 8
  %18 = load ptr, ptr %sibling30, align 8
  %call31 = call i32 %18(ptr nonnull %arrayidx, ptr nonnull %arrayidx)
  br label %if.end32
if.end32:
  %at.1 = phi i64 [ %inc27, %if.then25 ], [ %at.0, %if.else ]
  %end.1 = phi i32 [ %call29, %if.then25 ], [ %call31, %if.else ]
  br label %for.cond
}
